"""Frozen tables of every sharding type: looked up, and nothing of them travels back, is kept, or is planned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.errors import error_of
from torch import nn

import shardwright as sw
from shardwright_testing.simulated import run_simulated

# Simulated ranks average no dense gradients, which the guards say.
pytestmark = pytest.mark.filterwarnings("ignore:the ranks differ in the dense parameters:RuntimeWarning")
RATE, STEPS, BATCH = 0.5, 3, 4
TYPES = ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel"]
FUSED = {"optimizer": "adam", "learning_rate": RATE}


class Model(nn.Module):
    """A frozen and a trained table in one collection, and a collection of frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        tables = [
            sw.EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=[name])
            for name in ("still", "moved")
        ]
        self.mixed = sw.EmbeddingBagCollection(tables)
        self.frozen = sw.EmbeddingBagCollection(tables[:1])
        self.over = nn.Linear(24, 1)
        for bags in (self.mixed, self.frozen):
            bags.table_weight("still").requires_grad_(False)

    def forward(self, features: sw.KeyedJaggedTensor) -> torch.Tensor:
        both = [self.mixed(features).values(), self.frozen(features).values()]
        return self.over(torch.cat(both, 1)).square().mean()


def features(step: int, rank: int) -> sw.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.full((2 * BATCH,), 2)
    return sw.KeyedJaggedTensor(
        ["still", "moved"], torch.randint(0, 20, (4 * BATCH,), generator=generator), lengths=lengths
    )


def planner(world_size: int, kind: str | None, **options: Any) -> sw.EmbeddingShardingPlanner:
    constraint = sw.ParameterConstraints(sharding_types=[kind] if kind else None, min_partition=4)
    topology = sw.Topology(world_size, "cpu", local_world_size=2)
    return sw.EmbeddingShardingPlanner(topology, batch_size=BATCH, constraints={"*": constraint}, **options)


def sharded(
    model: nn.Module, env: Any, kind: str, update: str = "in_backward"
) -> sw.DistributedModelParallel:
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params=FUSED, update=update)]
    plan = planner(env.world_size, kind).plan(model, sharders)
    return sw.DistributedModelParallel(copy.deepcopy(model), env, "cpu", plan, sharders)


def train(model: Any, rank: int) -> None:
    dense = torch.optim.SGD(
        [p for _, p in sw.in_backward_optimizer_filter(model.named_parameters()) if p.requires_grad], lr=RATE
    )
    for step in range(STEPS):
        dense.zero_grad()
        model(features(step, rank)).backward()
        model.fused_optimizer.step()
        dense.step()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("update", ["in_backward", "in_step"])
def test_frozen_tables_stay_and_get_no_gradient_and_no_state(kind: str, update: str) -> None:
    whole = Model()
    before = whole.state_dict()

    def run(env: Any) -> tuple[Any, list[str]]:
        model = sharded(whole, env, kind, update)
        with torch.no_grad():
            loss = float(model(features(0, env.rank)))
            assert loss == pytest.approx(float(whole(features(0, env.rank))), rel=1e-5)
        names = list(model.fused_optimizer.full_state_dict()["state"])
        train(model, env.rank)
        return model.full_state_dict(), names

    for state, names in run_simulated(run, 4, local_world_size=2):
        for name, value in state.items():
            assert torch.equal(value, before[name]) == ("still" in name), name
        assert names
        assert not [name for name in names if "still" in name]


def test_no_gradient_travels_for_frozen_tables() -> None:
    def run(env: Any, module: nn.Module) -> list[str]:
        model = sharded(module, env, "row_wise")
        loss = model(features(0, env.rank))
        before = len(env.communicator.labels)
        loss.backward()
        return env.communicator.labels[before:]

    whole = Model()
    assert run_simulated(lambda env: run(env, whole), 2) == [["gradients"]] * 2  # of the one trained table
    whole.mixed.table_weight("moved").requires_grad_(False)
    assert run_simulated(lambda env: run(env, whole), 2) == [[]] * 2


def test_frozen_table_that_is_to_be_trained_later_is_an_error_on_all_ranks() -> None:
    whole = Model()

    def run(env: Any) -> str:
        model = sharded(whole, env, "table_wise")
        model.module.frozen.requires_grad_(True)
        return error_of(model, features(0, env.rank))

    for text in run_simulated(run, 2):
        assert "'frozen.still' (20 x 8 FP32) was frozen when it was sharded" in text
