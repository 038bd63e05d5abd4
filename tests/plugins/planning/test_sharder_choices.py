"""What a sharder's ``sharding_types`` and ``compute_kernels`` return limits what planners choose."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.errors import InvalidInputError, PlanningError, UnknownPluginError


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
