"""State dicts of real ranks: sharded by themselves, whole where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed import workers
from tests.distributed.checkpoints import state_workers
from tests.distributed.test_training import assert_same_state, unsharded_after

from shardwright_testing.ranks import RankPool

TYPES = ["row_wise", "table_wise", "column_wise"]


def test_state_dict_is_of_this_rank_alone_without_a_collective_or_a_copy(pool: RankPool) -> None:
    told = pool.run(state_workers.asked_by_a_logger, 2, TYPES)[0]
    expected = {name: tuple(value.shape) for name, value in workers.clicks().state_dict().items()}
    assert told["shapes"] == expected
    tables = [name for name in expected if "embedding_bags" in name]
    assert sorted(told["here"]) == sorted(tables)
    assert sum(told["here"].values()) < sum(expected[name][0] * expected[name][1] for name in tables)
    assert told["shared"]
    assert sorted(told["states"]) == sorted(tables)
    for name, states in told["states"].items():
        assert states == {"step": (), "exp_avg": expected[name], "exp_avg_sq": expected[name]}


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch takes no class of DTensors but its own before 2.13"
)
def test_full_state_dict_by_torch_is_rank_0s_and_that_of_the_unsharded_module(pool: RankPool) -> None:
    (first, whole), (second, other) = pool.run(state_workers.whole_by_torch, 2, TYPES)
    assert second == {}
    expected = unsharded_after(range(1), 2)[0].state_dict()
    for state in (first, whole, other):
        assert_same_state(state, expected)


def test_what_dcp_saves_of_two_ranks_it_loads_into_three(pool: RankPool, tmp_path: Path) -> None:
    weights, states = pool.run(state_workers.saved_by_torch, 2, TYPES, str(tmp_path))[0]
    for loaded, loaded_states in pool.run(state_workers.loaded_by_torch, 3, TYPES[::-1], str(tmp_path)):
        torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
        torch.testing.assert_close(loaded_states, states, rtol=0, atol=0)


@pytest.mark.parametrize("of_optimizer", [False, True], ids=["model", "optimizer"])
def test_wrong_shape_on_one_rank_is_an_error_of_all_and_the_next_step_trains(
    pool: RankPool, of_optimizer: bool
) -> None:
    for kinds in pool.run(state_workers.load_what_one_rank_has_wrong, 2, TYPES, of_optimizer=of_optimizer):
        assert all(kinds)


def test_torch_save_says_what_to_do(pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(state_workers.saved_by_pickle, 2, TYPES, str(tmp_path)):
        assert text.startswith("UnsupportedError: ")
        for advice in ("save_checkpoint", "torch.distributed.checkpoint.save", "full_state_dict()"):
            assert advice in text
