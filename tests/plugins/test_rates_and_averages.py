"""Learning rates by table, warm-up, and exponential averages of tables: as in the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

import shardwright as sw
from shardwright_testing.simulated import run_simulated

STEPS, DECAY = 5, 0.75
RATES = {"user": 0.5, "item": 0.1}


def collection() -> sw.EmbeddingBagCollection:
    torch.manual_seed(2)
    tables = [
        sw.EmbeddingBagConfig(name=name, num_embeddings=12, embedding_dim=8, feature_names=[name])
        for name in RATES
    ]
    return sw.EmbeddingBagCollection(tables)


def features(step: int, rank: int) -> sw.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.full((6,), 2)
    return sw.KeyedJaggedTensor(
        list(RATES), torch.randint(0, 12, (12,), generator=generator), lengths=lengths
    )


def scheduled(optimizer: Any) -> Any:
    """Two steps of warm-up, then a decay."""
    warm_up = LambdaLR(optimizer, lambda step: (step + 1) / 3)
    return SequentialLR(optimizer, [warm_up, StepLR(optimizer, 1, gamma=0.5)], milestones=[2])


def average(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            into[name].lerp_(value, 1 - DECAY)


def unsharded(world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    bags = collection()
    parameters = dict(bags.named_parameters())
    groups = [{"params": [own], "lr": RATES[name.split(".")[1]]} for name, own in parameters.items()]
    optimizer = torch.optim.SGD(groups)
    schedule, ema = scheduled(optimizer), copy.deepcopy(bags.state_dict())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            (bags(features(step, rank)).values().square().sum() / world_size).backward()
        optimizer.step()
        schedule.step()
        average(ema, parameters)
    return bags.state_dict(), ema


@pytest.mark.parametrize("update", ["in_backward", "in_step"])
@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "data_parallel"])
def test_rates_by_table_with_warm_up_and_averaged_tables_equal_the_unsharded_ones(
    kind: str, update: str
) -> None:
    constraint = sw.ParameterConstraints(sharding_types=[kind], min_partition=4)
    planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), batch_size=3, constraints={"*": constraint})
    bags = collection()
    sharders = [sw.EmbeddingBagCollectionSharder(update=update)]
    plan = planner.plan(bags, sharders)

    def train(env: Any) -> tuple[Any, Any]:
        own = copy.deepcopy(bags)
        for name, rate in RATES.items():
            sw.apply_optimizer_in_backward(torch.optim.SGD, [own.table_weight(name)], {"lr": rate})
        model = sw.DistributedModelParallel(own, env, "cpu", plan, sharders)
        optimizer = model.fused_optimizer
        schedule = scheduled(optimizer)
        blocks = dict(model.named_parameters())
        ema = {name: block.detach().clone() for name, block in blocks.items()}
        for step in range(STEPS):
            optimizer.zero_grad()
            model(features(step, env.rank)).values().square().sum().backward()
            optimizer.step()
            schedule.step()
            average(ema, blocks)
        trained = {name: value.clone() for name, value in model.full_state_dict().items()}
        with torch.no_grad():  # evaluate and save the averages in the tables' place
            for name, block in blocks.items():
                block.copy_(ema[name])
        return trained, model.full_state_dict()

    expected = unsharded(2)
    for results in run_simulated(train, 2):
        for actual, wanted in zip(results, expected, strict=True):
            assert list(actual) == list(wanted)
            torch.testing.assert_close(actual, wanted)
