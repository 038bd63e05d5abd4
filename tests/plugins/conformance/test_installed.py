"""`installed`: tests of a plugin test the author's object, whatever is installed under its name."""

from __future__ import annotations

import pytest
from tests.core.conftest import make_class, make_plugin

import shardwright as sw
from shardwright.host import PluginHost, host, use_host
from shardwright_testing import installed


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
