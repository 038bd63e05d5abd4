"""Several process groups and comm backends in one model: by what is exchanged, and by collection."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.channels import channel_workers
from tests.distributed.test_training import assert_same_state, of_ranks, trained_by_sgd
from tests.equality import Case, assert_equals_unsharded
from tests.plugins.training.test_equality import tables_of

import shardwright as sw
from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed
STEPS = 3


def test_ids_that_travel_by_a_process_group_of_their_own_train_as_unsharded(pool: RankPool) -> None:
    case = Case(
        [*tables_of("row_wise", "fused_torch")[:2], *tables_of("table_wise", "fused_torch")[2:]], (3, 4)
    )
    results = pool.run(channel_workers.train_by_two_channels, 2, case)
    assert_equals_unsharded(case, [result for result, _ in results])
    for _, carried in results:
        assert carried == {
            "ids": ["ids"],
            "others": ["gradients", "results"],
        }  # headers have a communicator too


def test_sums_inside_a_host_that_travel_by_a_group_of_its_ranks_train_as_unsharded(pool: RankPool) -> None:
    tables = [*tables_of("table_row_wise", "fused_torch")[:2], *tables_of("row_wise", "fused_torch")[:1]]
    case = Case(tables, (3, 0, 2, 4), local_world_size=2)
    results = pool.run(channel_workers.train_by_tiers, 4, case)
    assert_equals_unsharded(case, [result for result, _ in results])
    for _, carried in results:
        assert carried["inside"] == ["gradients inside the host", "results inside the host"]
        assert carried["ids"] == ["ids"]
        assert "results across hosts" in carried["others"]


@pytest.mark.parametrize("is_piped", [False, True])
def test_collection_over_a_group_of_its_sharder_trains_and_is_saved_beside_others_as_in_one_process(
    pool: RankPool, is_piped: bool, tmp_path: Path
) -> None:
    batches = (of_ranks(step, 2) for step in range(STEPS))
    expected = trained_by_sgd(channel_workers.towers(), batches, 2)
    for carried, state in pool.run(
        channel_workers.train_over_two_groups, 2, STEPS, str(tmp_path), is_piped=is_piped
    ):
        assert carried["ids"] == ["ids"]
        assert_same_state(state, expected)
    sw.load_checkpoint(tmp_path, loaded := channel_workers.towers())
    assert_same_state(loaded.state_dict(), expected)
