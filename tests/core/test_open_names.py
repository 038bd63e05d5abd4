"""`ShardingType.SOME_NAME.value`: registered names as attributes of their contract."""

from __future__ import annotations

import argparse
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


def test_name_is_one_object_as_a_member_of_an_enumeration():
    name = ShardingType.WHOLE
    assert ShardingType("whole") is ShardingType["WHOLE"] is next(reversed(list(ShardingType))) is name
    assert copy.copy(name) is copy.deepcopy(name) is pickle.loads(pickle.dumps(name)) is name


def test_unknown_name_raises_what_an_enumeration_raises():
    with pytest.raises(ValueError, match=r"no sharding type 'hole'\. .*Did you mean 'whole'"):
        ShardingType("hole")
    with pytest.raises(KeyError) as raised:
        ShardingType["HOLE"]
    assert str(raised.value).startswith("no sharding type 'hole'. Known")  # no quotes around it
    assert "Did you mean 'whole'" in str(raised.value)
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--type", type=ShardingType)
    with pytest.raises(argparse.ArgumentError, match="'hole'"):
        parser.parse_args(["--type", "hole"])


def test_name_that_nobody_offers_raises_with_the_nearest():
    with pytest.raises(
        AttributeError,
        match=re.escape("no sharding type 'dealt_row'. Known: dealt_rows, whole. Did you mean 'dealt_rows'?"),
    ):
        _ = ShardingType.DEALT_ROW


def test_contract_is_used_as_an_enumeration():
    assert list(ShardingType) == ["dealt_rows", "whole"]
    assert [member.name for member in ShardingType] == ["DEALT_ROWS", "WHOLE"]
    assert [member.value for member in ShardingType] == ["dealt_rows", "whole"]
    assert len(ShardingType) == 2
    assert ShardingType("dealt") is not None
    assert ShardingType("dealt") == ShardingType["DEALT_ROWS"] == ShardingType.DEALT_ROWS
    assert {ShardingType.WHOLE: 1}[ShardingType("whole")] == 1
    assert bool(ShardingType)
