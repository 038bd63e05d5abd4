"""What the built-in plugins offer keeps what the conformance kit asks of its kind, whose row names the tests."""

from __future__ import annotations

from typing import Any

import pytest
from tests.as_asked import AsAsked
from tests.plugins.built_in import built_in

import shardwright_testing
from shardwright import ParameterConstraints, ShardingType
from shardwright.hookspecs import KINDS
from shardwright.host import host
from shardwright.host.offers import Kind
from shardwright_testing import ShardingTypeTests

ELSEWHERE = ("optimizer", "sharding_type")  # some of their tests are slow: modules of their own say which


def kit_of(kind: Kind[Any]) -> type:
    """The kit's class of tests of a kind, over the built-ins."""

    def one(self: object, request: pytest.FixtureRequest) -> Any:
        return host().registry_of(kind.contract).create(request.param)

    fixture = pytest.fixture(one, name=kind.name, params=built_in(kind.label))
    name = kind.kit.rpartition(".")[2]
    tests = type(f"Test{name}", (getattr(shardwright_testing, name),), {kind.name: fixture})
    return pytest.mark.distributed(tests) if kind.name == "comm_backend" else tests


globals().update({f"Test_{kind.name}": kit_of(kind) for kind in KINDS if kind.name not in ELSEWHERE})


class TestShardingTypes(ShardingTypeTests):
    @pytest.fixture(params=built_in("sharding_types"))
    def sharding_type(self, request: pytest.FixtureRequest) -> ShardingType:
        return host().sharding_types.create(request.param)

    @pytest.mark.slow  # in each run, `test_equality.py` draws models of all types, and the matrix has them all
    @pytest.mark.parametrize("mode", ["pooled", "weighted", "sequence"])
    def test_sharded_module_equals_unsharded(self, sharding_type: ShardingType, mode: str) -> None:
        super().test_sharded_module_equals_unsharded(sharding_type, mode)

    @pytest.mark.slow  # in each run, `tests/plugins/checkpoint` loads any cut under any other
    def test_checkpoint_loads_under_another_plan(self, sharding_type: ShardingType) -> None:
        super().test_checkpoint_loads_under_another_plan(sharding_type)


class ByShapeSaysItself(AsAsked):
    """Says that shapes are all it looks at, and looks at extras."""

    name, abbreviation, depends_on_shape_only = "by_shape_says_itself", "BS", True


class AskedToCut(ShardingTypeTests):
    """The kit, not collected: its methods are called below."""

    __test__ = False
    constraints = ParameterConstraints(extras={"cut": True})


@pytest.mark.parametrize("kit", [ShardingTypeTests, AskedToCut])
@pytest.mark.parametrize("case", ["plain", "float16", "extras"])
def test_kit_plans_of_a_type_that_looks_at_what_it_is_told_come_back(kit, case):
    kit().test_planner_plans_it_by_name_and_the_plan_survives_json(AsAsked(), case)


def test_kit_finds_a_type_that_says_shapes_and_looks_at_extras():
    with pytest.raises(
        AssertionError, match="says depends_on_shape_only, but looks at the extras of constraints"
    ):
        AskedToCut().test_layouts_are_the_same_each_time(ByShapeSaysItself())
