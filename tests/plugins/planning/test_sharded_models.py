"""Plans for models that are sharded already: as for the unsharded ones, and for `reshard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.errors import raises

import shardwright as sw
from shardwright.errors import PlanningError
from shardwright.runtime.sharded.models.dense_bytes import dense_bytes
from shardwright_plugins.refinements.stay_near import StayNear

LOCAL = sw.ShardingEnv.local(device_type="cpu")
FUSED = {"optimizer": "adam", "learning_rate": 0.1, "max_gradient": 0.5}


class RowWiseOnly(sw.EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


def clicks() -> torch.nn.Module:
    def tables(kind: Any, *names: str) -> list[Any]:
        return [kind(name=name, num_embeddings=40, embedding_dim=8, feature_names=[name]) for name in names]

    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {
            "bags": sw.EmbeddingBagCollection(tables(sw.EmbeddingBagConfig, "user", "item"), device="cpu"),
            "seen": sw.EmbeddingCollection(tables(sw.EmbeddingConfig, "seen"), device="cpu"),
            "over": torch.nn.Linear(3, 2),
        }
    )


def sharders(kind: type[sw.EmbeddingBagCollectionSharder]) -> Sequence[sw.ModuleSharder]:
    return [kind(FUSED, update="in_step"), sw.EmbeddingCollectionSharder()]


def planner(**options: Any) -> sw.EmbeddingShardingPlanner:
    return sw.EmbeddingShardingPlanner(sw.Topology(1, "cpu"), **options)


@pytest.mark.parametrize("kind", [sw.EmbeddingBagCollectionSharder, RowWiseOnly])
def test_plan_of_a_sharded_model_is_that_of_the_unsharded_one(kind: Any) -> None:
    expected = planner().plan(clicks(), sharders(kind))
    model = sw.DistributedModelParallel(clicks(), LOCAL, sharders=sharders(kind))
    for given in (model, model.module):
        plan = planner().plan(given)
        assert plan.plan == expected.plan
        assert plan.document["inputs"]["tables"] == expected.document["inputs"]["tables"]
    assert planner().collective_plan(model, env=LOCAL).plan == expected.plan
    assert dense_bytes(model.module, []) == dense_bytes(clicks(), sharders(kind))


def test_model_goes_to_the_plan_made_of_it_and_stays_if_asked() -> None:
    model = sw.DistributedModelParallel(
        clicks(), LOCAL, sharders=sharders(sw.EmbeddingBagCollectionSharder), update="in_backward"
    )
    before = {name: value.clone() for name, value in model.full_state_dict().items()}
    rule = sw.ParameterConstraints(sharding_types=["column_wise"], min_partition=4)
    moved = model.reshard(planner(constraints={"user": rule}).plan(model))
    assert moved.tables == ("bags.user",)
    assert model.plan.plan["bags"]["user"].sharding_type == "column_wise"
    assert all(torch.equal(model.full_state_dict()[name], value) for name, value in before.items())
    stay = planner(refinements=[StayNear(model.plan, move_cost=1e6)], constraints={"user": rule})
    assert model.reshard(stay.plan(model)).tables == ()


def test_model_without_tables_is_an_error_with_sharders_or_without() -> None:
    for given in (None, [sw.EmbeddingBagCollectionSharder()]):
        with raises(PlanningError):
            planner().plan(torch.nn.Linear(1, 1), given)
