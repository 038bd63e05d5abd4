"""A step keeps the learning rate with which its forward pass began: every sharding type and fused kernel alike."""

from __future__ import annotations

import pytest
import torch
from tests.equality import Case, Table, shard_case
from tests.pairs import each_once
from tests.plugins.training.test_equality import kernels, sharding_types, supports

from shardwright.host import host
from shardwright_testing.simulated import run_simulated

FUSED = [name for name in kernels() if host().compute_kernels.create(name).fuses_optimizer]


def tables_of(kernel: str, pooling: str) -> list[Table]:
    """A table of each sharding type: few rows, so that copies are synchronised by rows and by dense gradients, too."""
    return [
        Table(rows, 8, (f"f{index}_{rows}",), pooling, sharding_type, kernel, offset=index)
        for index, sharding_type in enumerate(sharding_types())
        for rows in (3, 500)
    ]


@pytest.mark.parametrize(
    ("kernel", "pooling", "between"),
    each_once(FUSED, ["SUM", "NONE"], ["param_groups", "zero_grad", "step", "another forward pass"]),
)
def test_step_keeps_the_learning_rate_of_its_forward_pass(kernel: str, pooling: str, between: str) -> None:
    tables = tables_of(kernel, pooling)
    assert all(supports(kernel, table, "sgd", world_size=2) for table in tables)
    case = Case(tables, (3, 2), "sgd")
    module = case.module()

    def train(env):
        sharded = shard_case(case, env, module)
        optimizer = sharded.fused_optimizer
        values = case.output(sharded(case.batch(0, env.rank)))
        for group in optimizer.param_groups:
            group["lr"] = 0.7
        if between == "another forward pass":
            sharded(case.batch(1, env.rank))
        elif between != "param_groups":
            getattr(optimizer, between)()
        values.backward(case.gradient(0, env.rank, values))
        first = sharded.full_state_dict()
        values = case.output(sharded(case.batch(1, env.rank)))
        values.backward(case.gradient(1, env.rank, values))
        return first, sharded.full_state_dict()

    for sharded in run_simulated(train, case.world_size):
        module = case.module()
        for step, (rate, weights) in enumerate(zip((0.1, 0.7), sharded, strict=True)):
            optimizer = torch.optim.SGD(module.parameters(), lr=rate)
            optimizer.zero_grad()
            for rank in range(case.world_size):
                values = case.output(module(case.batch(step, rank)))
                values.backward(case.gradient(step, rank, values) / case.world_size)
            optimizer.step()
            for name, weight in module.named_parameters():
                torch.testing.assert_close(
                    weights[name], weight.detach(), msg=lambda text, name=name: f"{name}: {text}"
                )
