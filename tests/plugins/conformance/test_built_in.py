"""What the built-in plugins offer keeps what the conformance kit asks of its kind, whose row names the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.as_asked import AsAsked
from tests.core.conftest import make_class, make_plugin
from tests.plugins.built_in import built_in
from tests.stranger import run_python

import shardwright as sw
import shardwright_testing
from shardwright import ParameterConstraints, ShardingType
from shardwright.hookspecs import KINDS
from shardwright.host import PluginHost, host, use_host
from shardwright.host.offers import Kind
from shardwright_testing import ShardingTypeTests, installed

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


@pytest.fixture
def dealt() -> type:
    """A sharding type with an argument."""

    def keep(self: sw.ShardingType, num_hot: int = 1) -> None:
        self.num_hot = num_hot

    return make_class(sw.ShardingType, "dealt", __init__=keep)


def test_installed_object_is_served_where_its_class_is_installed(dealt: type) -> None:
    kernel = make_class(sw.ComputeKernel, "goes_with_it")
    hooks = {"shardwright_sharding_types": lambda: [dealt], "shardwright_compute_kernels": lambda: [kernel]}
    with use_host(PluginHost(entry_points=(), plugins={"acme": make_plugin(hooks)}, environment={})):
        with installed(dealt(num_hot=7)):
            assert host().sharding_types.create("dealt").num_hot == 7
            assert host().compute_kernels["goes_with_it"] is kernel
            with installed(dealt(num_hot=8)):
                assert host().sharding_types.create("dealt").num_hot == 8
        assert host().sharding_types.create("dealt").num_hot == 1


def test_installed_objects_are_there_beside_each_other(dealt: type) -> None:
    kernel = make_class(sw.ComputeKernel, "mine")()
    with installed(dealt()) as outer, installed(kernel) as both:
        assert "mine" not in outer.compute_kernels
        assert {"dealt", "row_wise"} <= set(both.sharding_types)
        assert both.compute_kernels["mine"] is kernel


PIP = (
    "-m",
    "pip",
    "install",
    "--quiet",
    "--no-index",
    "--no-deps",
    "--no-build-isolation",
    "--disable-pip-version-check",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_new_plugin_installs_and_passes_the_kit(kind: str, tmp_path: Path) -> None:
    name, project, site = f"acme_{kind}", tmp_path / "project", tmp_path / "site"
    written = run_python("-m", "shardwright", "plugin", "new", name, "--kind", kind, "--output", str(project))
    assert written.returncode == 0, written.stderr
    installed = run_python(*PIP, "--target", str(site), str(project))
    assert installed.returncode == 0, installed.stderr
    shown = run_python("-m", "shardwright", "plugins", name, site=site)
    assert f"{name} ({kind}s), loaded" in shown.stdout, shown.stdout + shown.stderr
    options = (
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(project),
        str(project / "tests"),
    )
    tested = run_python("-m", "pytest", *options, site=site)
    assert tested.returncode == 0, tested.stdout[-4000:]
    assert " passed" in tested.stdout
