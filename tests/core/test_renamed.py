"""Attributes of contracts that were renamed: plugins may still give and read them under their old names."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from shardwright import Estimator, KernelRequest, OptionSpace, ShardingType, TableSpec, Topology
from shardwright.planning.tables.option_space import EVERYTHING
from shardwright_testing import SimulatedCommunicator

TOPOLOGY = Topology(world_size=2, compute_device="cpu")
SOME = OptionSpace(min_partition=8)


def old_estimator() -> type[Estimator]:
    class Old(Estimator):
        name = "old"
        answers_by_shape = True

        def space(self, topology: Topology) -> OptionSpace:
            assert super().space(topology) is EVERYTHING  # type: ignore[misc]
            return SOME

        def estimate(self, options: Any, topology: Any) -> Any:
            return {}

    return Old


def test_estimator_may_give_old_names() -> None:
    with pytest.warns(DeprecationWarning, match="Old") as found:
        old = old_estimator()
    assert {str(warning.message) for warning in found} == {
        "Old.answers_by_shape is called depends_on_shape_only now",
        "Old.space is called option_space now",
    }
    assert {warning.filename for warning in found} == {__file__}
    assert old.depends_on_shape_only
    with pytest.warns(DeprecationWarning, match="space is called option_space"):
        assert old().option_space(TOPOLOGY) is SOME


def test_estimator_may_be_read_by_old_names() -> None:
    class New(Estimator):
        name = "new"
        depends_on_shape_only = True

        def estimate(self, options: Any, topology: Any) -> Any:
            return {}

    class Newer(New):
        pass

    for estimator in (New(), Newer()):
        with pytest.warns(DeprecationWarning, match="answers_by_shape is called depends_on_shape_only"):
            assert estimator.answers_by_shape  # type: ignore[attr-defined]
        with pytest.warns(DeprecationWarning, match="answers_by_shape is called"):
            estimator.answers_by_shape = False  # type: ignore[attr-defined]
        assert not estimator.depends_on_shape_only


def test_sharding_type_may_give_old_names() -> None:
    with pytest.warns(DeprecationWarning, match="Old.answers_by_shape"):

        class Old(ShardingType):
            name, abbreviation, answers_by_shape = "old", "OL", True

            def layouts(self, table: Any, topology: Any, constraints: Any) -> Any:
                return []

    assert Old().depends_on_shape_only


def test_kernel_request_has_its_old_name() -> None:
    table = TableSpec("t", 10, 4, ["f"])
    with pytest.warns(DeprecationWarning, match="here is called on_this_machine") as found:
        request = KernelRequest.of(table, 4, device="cpu", here=True)
    assert found[0].filename == __file__
    assert request == KernelRequest.of(table, 4, device="cpu", on_this_machine=True)
    with pytest.warns(DeprecationWarning, match="here is called on_this_machine"):
        assert request.here


def test_communicator_may_give_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="Old.on_host is called on_cpu"):

        class Old(SimulatedCommunicator):
            def on_host(self) -> Any:
                return self

    assert Old.on_cpu is Old.on_host


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("shardwright.plugins", {"KINDS", "PluginHost", "host", "use_host"}),
        ("shardwright.registry", {"Registry"}),
        ("shardwright.fingerprint", {"Fingerprint", "compare_fingerprints"}),
    ],
)
def test_modules_of_the_plugin_host_are_found_where_they_were(module: str, names: set[str]) -> None:
    found: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match="stands in shardwright.") as told:
        exec(f"from {module} import *", found)
    assert {name for name in found if not name.startswith("__")} == names
    assert len(told) == len(names)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nobody'"):
        importlib.import_module(module).nobody  # noqa: B018
