"""State dicts of real ranks: sharded by themselves, whole where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.checkpoints import state_workers
from tests.distributed.test_training import assert_same_state, unsharded_after

from shardwright_testing.ranks import RankPool

TYPES = ["row_wise", "table_wise", "column_wise"]


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
