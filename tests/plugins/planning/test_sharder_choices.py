"""What a sharder's methods return limits what planners choose; types that are offered; models that are sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.errors import raises
from tests.plugins.planning.test_planning import RoundRobinRows

import shardwright as sw
from shardwright.errors import InvalidInputError, PlanningError, UnknownPluginError
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.models.dense_bytes import dense_bytes
from shardwright_plugins.refinements.stay_near import StayNear
from shardwright_testing import installed


def sharder(types=None, kernels=None):
    """A sharder of bags that overrides the methods for which something is given."""
    methods = {}
    if types is not None:
        methods["sharding_types"] = lambda self, device: types
    if kernels is not None:
        methods["compute_kernels"] = lambda self, sharding_type, device: kernels(sharding_type)
    return type("Picky", (sw.EmbeddingBagCollectionSharder,), methods)()


def plan_of(picky, rule=None, **arguments):
    bags = sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=64, feature_names=["f"])],
        device="meta",
    )
    topology = sw.Topology(world_size=2, compute_device="cpu")
    constraints = {"t": sw.ParameterConstraints(**rule)} if rule else None
    return sw.EmbeddingShardingPlanner(topology, 64, constraints=constraints, **arguments).plan(bags, [picky])


def chosen(plan):
    sharding = plan.plan[""]["t"]
    return sharding.sharding_type, sharding.compute_kernel


@pytest.mark.parametrize("name", ["row_wise", "column_wise", "data_parallel"])
def test_sharding_types_of_a_subclass_are_the_only_ones_chosen(name):
    assert chosen(plan_of(sharder(types=[name])))[0] == name


@pytest.mark.parametrize("name", ["dense", "fused_torch", "fused"])
def test_compute_kernels_of_a_subclass_are_the_only_ones_chosen(name):
    assert chosen(plan_of(sharder(kernels=lambda _: [name])))[1] == name


def test_compute_kernels_of_a_subclass_may_depend_on_the_sharding_type():
    kernels = {"table_wise": ["fused_torch"], "data_parallel": ["dense"]}
    picky = sharder(list(kernels), lambda sharding_type: kernels[sharding_type])
    for name, own in kernels.items():
        assert chosen(plan_of(picky, {"sharding_types": [name]})) == (name, own[0])


def test_base_class_returns_names_that_a_subclass_can_choose_among():
    base = sw.EmbeddingBagCollectionSharder()
    names = [name for name in base.sharding_types("cpu") if name in ("row_wise", "grid_shard")]
    kernels = base.compute_kernels("row_wise", "cpu")
    assert {"fused", "fused_torch"} < set(kernels)
    assert "dense" not in kernels
    assert chosen(plan_of(sharder(names, lambda _: kernels)))[0] in names


@pytest.mark.parametrize(
    ("types", "kernels", "rule"),
    [
        (["row_wise"], None, {"sharding_types": ["table_wise"]}),
        (None, lambda _: ["fused_torch"], {"compute_kernels": ["dense"]}),
    ],
)
def test_constraint_that_the_sharder_does_not_allow_is_an_error_that_says_so(types, kernels, rule):
    with pytest.raises(PlanningError, match=r"no option is left for table 't' .*sharder .*does not allow it"):
        plan_of(sharder(types, kernels), rule)


@pytest.mark.parametrize(
    ("picky", "error", "text"),
    [
        (
            sharder(["row_wize"]),
            UnknownPluginError,
            r"Picky.sharding_types\('cpu'\).*Did you mean 'row_wise'",
        ),
        (
            sharder(["row_wise"], lambda _: ["fussed"]),
            UnknownPluginError,
            r"Picky.compute_kernels\('row_wise', 'cpu'\).*Did you mean 'fused'",
        ),
        (sharder("row_wise"), InvalidInputError, r"must return a list of names, it returned 'row_wise'"),
    ],
)
def test_answer_that_cannot_be_used_is_an_error_naming_the_sharder(picky, error, text):
    with pytest.raises(error, match=text):
        plan_of(picky)


WIDTHS = (16, 64, 128)


def tables_of(shapes: list[tuple[int, int]]) -> list[TableSpec]:
    return [TableSpec(f"t{i}", rows, dim, [f"f{i}"]) for i, (rows, dim) in enumerate(shapes)]


def planned(tables: list[TableSpec], **arguments: Any) -> tuple[Mapping[str, Any], Any]:
    topology = sw.Topology(4, "cpu", ddr_cap=1 << 30)
    planner = sw.EmbeddingShardingPlanner(topology, 256, **arguments)
    return planner.plan_tables(tables).plan, planner.report


@drawn(
    st.lists(st.tuples(st.integers(1, 200_000), st.sampled_from(WIDTHS)), min_size=1, max_size=6),
    quick=3,
    thorough=20,
)
def test_type_that_nobody_asked_for_changes_no_plan(shapes: list[tuple[int, int]]) -> None:
    tables = tables_of(shapes)
    without, report = planned(tables)
    with installed(RoundRobinRows()):
        beside, other = planned(tables)
    assert beside == without
    assert other.result.plan.value_ms == report.result.plan.value_ms


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
