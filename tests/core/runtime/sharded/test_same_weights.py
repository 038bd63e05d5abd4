"""Weights before a model is sharded: the same on all ranks, refused or made rank 0's where they are not."""

from __future__ import annotations

import pytest
import torch
from tests.core.runtime.plans import Cut, Cuts

from shardwright import (
    DistributedError,
    DistributedModelParallel,
    EmbeddingModuleShardingPlan,
    RowsRange,
    ShardingPlan,
)
from shardwright_plugins.dataflows import Replicate
from shardwright_testing import run_simulated

ROWS = Cut(150, 3, ("a",), row_map=RowsRange(150, parts=3), ranks=(0, 1, 2))
COLUMNS = Cut(40, 6, ("b",), edges=(2, 4), ranks=(0, 1, 2))
COPIES = Cut(40, 4, ("c",), ranks=(0, 1, 2), dataflow=Replicate())
CASE = Cuts([ROWS, COLUMNS, COPIES], 3)


def one_value(weight):
    weight[149 % len(weight), 0] += 1e-6


def order_of_rows(weight):
    weight.copy_(weight.flip(0))


def sign_of_zero(weight):
    weight[0] = -0.0


DIFFERENCES = [one_value, order_of_rows, sign_of_zero]


def modules(change, tables):
    """A module for each rank; rank 1's has other weights of some tables."""
    made = [CASE.module() for _ in range(CASE.world_size)]
    with torch.no_grad():
        for table in tables:
            for module in made:
                module.table_weight(table)[0] = 0.0
            change(made[1].table_weight(table))
    return made


def errors(work):
    def run(env):
        with pytest.raises(DistributedError) as error:
            work(env)
        return str(error.value)

    return run_simulated(run, CASE.world_size)


@pytest.mark.parametrize("change", DIFFERENCES)
@pytest.mark.parametrize("table", ["t0", "t1", "t2"])
def test_other_weights_on_one_rank_are_one_error_on_all(change, table):
    made = modules(change, [table])
    texts = errors(lambda env: CASE.shard(env, made[env.rank]))
    assert len(set(texts)) == 1
    assert f"table '{table}' is ranks 0, 2: checksum " in texts[0]
    assert "; rank 1: checksum " in texts[0]
    assert "(1 of 3 differ)" in texts[0]


def model_of(env, module, **options):
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(CASE.shardings())})
    return DistributedModelParallel(
        module, env=env, device="cpu", plan=plan, sharders=[CASE.sharder], **options
    )


@pytest.mark.parametrize("change", DIFFERENCES)
def test_sync_module_states_takes_the_first_ranks_weights(change):
    made = modules(change, ["t0", "t2"])
    expected = {name: weight.clone() for name, weight in made[0].state_dict().items()}
    for state in run_simulated(
        lambda env: model_of(env, made[env.rank], sync_module_states=True).full_state_dict(), CASE.world_size
    ):
        assert {name: weight.numpy().tobytes() for name, weight in state.items()} == {
            name: weight.numpy().tobytes() for name, weight in expected.items()
        }


@pytest.mark.parametrize("sync", [False, True])
def test_meta_on_one_rank_alone_is_one_error_on_all(sync):
    made = [CASE.module(), CASE.module("meta"), CASE.module()]
    texts = errors(lambda env: model_of(env, made[env.rank], sync_module_states=sync))
    assert len(set(texts)) == 1
    assert "; rank 1: on 'meta'" in texts[0]


def test_weights_that_are_a_part_of_a_larger_tensor_are_compared():
    made = [CASE.module() for _ in range(3)]
    for rank, module in enumerate(made):
        weight = module.table_weight("t1")
        whole = torch.full((weight.numel() + 2 * rank + 1,), float(rank))
        whole[rank:-1][: weight.numel()] = weight.detach().flatten()
        weight.data = whole[rank : rank + weight.numel()].view(weight.shape)
    expected = made[0].state_dict()
    for state in run_simulated(lambda env: CASE.shard(env, made[env.rank]).full_state_dict(), 3):
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)
