"""Real processes over gloo: codecs send there what they send between simulated ranks."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from tests.equality import Case, Table
from tests.plugins.codecs.test_training import Step, train_rank, train_step

from shardwright import QCommsConfig, ShardingEnv
from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed

MIXED = {
    "t0": QCommsConfig("fp16", "int8"),
    "t1": QCommsConfig("int8", "bf16"),
    "t2": QCommsConfig(backward_precision="fp16"),
    "t3": QCommsConfig("bf16", "fp16"),
}


def case_of(pooling: str) -> Case:
    types = ["table_wise", "row_wise", "column_wise", "table_row_wise"]
    tables = [
        Table(11 + index, 12, (f"f{index}", "shared"), pooling, name, "fused_torch", index, index)
        for index, name in enumerate(types)
    ]
    return Case(tables, (4, 5))


def train_on_gloo(case: Case) -> Step:
    return train_rank(case, MIXED, ShardingEnv.from_process_group(), case.module())


@pytest.mark.parametrize("pooling", ["SUM", "NONE"])
def test_codecs_on_gloo_are_as_on_simulated_ranks(pool: RankPool, pooling: str) -> None:
    case = case_of(pooling)
    simulated = train_step(evolve(case, local_world_size=2), MIXED)
    for real, expected in zip(pool.run(train_on_gloo, 2, case), simulated, strict=True):
        torch.testing.assert_close(real.output, expected.output, rtol=1e-6, atol=1e-7)
        for key, weight in expected.weights.items():
            torch.testing.assert_close(real.weights[key], weight, rtol=1e-6, atol=1e-7)
