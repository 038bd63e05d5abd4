"""`ShardingType.SOME_NAME.value`: registered names as attributes of their contract."""

from __future__ import annotations

import copy
import json
import pickle
import re

import pytest

from shardwright.contracts import ShardingType
from shardwright.host import PluginHost, use_host


@pytest.fixture(autouse=True)
def _two_types(plugin_of, sharding_type):
    plugin = plugin_of(sharding_type("dealt_rows", aliases=("dealt",)), sharding_type("whole"))
    with use_host(PluginHost(entry_points=(), plugins={"made": plugin}, environment={})):
        yield


def test_name_of_a_registered_plugin_is_there_with_a_value():
    name = ShardingType.DEALT_ROWS
    assert (name, name.value, str(name), f"{name}") == ("dealt_rows",) * 4
    assert type(name.value) is str
    assert {name: 1} == {"dealt_rows": 1}
    assert json.dumps([name]) == '["dealt_rows"]'


def test_name_of_an_alias_is_the_name_it_stands_for():
    assert ShardingType.DEALT == "dealt_rows"


def test_name_survives_copies():
    name = ShardingType.WHOLE
    assert copy.deepcopy(name) == pickle.loads(pickle.dumps(name)) == "whole"
    assert pickle.loads(pickle.dumps(name)).value == "whole"


def test_name_that_nobody_offers_raises_with_the_nearest():
    with pytest.raises(
        AttributeError,
        match=re.escape("no sharding type 'dealt_row'. Known: dealt_rows, whole. Did you mean 'dealt_rows'?"),
    ):
        _ = ShardingType.DEALT_ROW


@pytest.mark.parametrize("attribute", ["dealt_rows", "_WHOLE", "Whole", "__wrapped__"])
def test_attribute_that_is_no_constant_asks_no_registry(attribute):
    with pytest.raises(AttributeError, match=f"type object 'ShardingType' has no attribute '{attribute}'"):
        getattr(ShardingType, attribute)
    assert not hasattr(ShardingType, attribute)


def test_name_of_a_plugin_class_is_its_contracts(sharding_type):
    assert sharding_type("other").WHOLE == "whole"


def test_names_of_this_host_only():
    with (
        use_host(PluginHost(entry_points=(), plugins={}, environment={})),
        pytest.raises(AttributeError, match=r"no sharding type 'whole'\. Known: none\."),
    ):
        _ = ShardingType.WHOLE
