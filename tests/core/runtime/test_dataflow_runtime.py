"""What runs a dataflow: the runtime knows core's own by class, a plugin's names its own."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen

from shardwright import DirectReturn, Exchange, Hierarchical, Replicate, Routed
from shardwright.errors import UnsupportedError
from shardwright.runtime.replicated.tables import ReplicatedTables
from shardwright.runtime.routed.hierarchical import HostReturn
from shardwright.runtime.routed.tables import RoutedTables, return_path_of
from shardwright.runtime.sharded.collections.executors import executor_of


class OtherReturn(DirectReturn):
    pass


class OtherTables(RoutedTables):
    pass


@frozen
class Overriding(Exchange):
    def executor(self) -> Any:
        return OtherTables

    def return_path(self, *, is_pooled: bool) -> Any:
        return OtherReturn if is_pooled else None


@frozen
class Derived(Hierarchical):
    pass


@frozen
class Silent(Routed):
    name = "silent"

    def return_path(self, *, is_pooled: bool) -> Any:
        return None


@pytest.mark.parametrize(
    ("dataflow", "pooled", "sequences"),
    [
        (Exchange(), DirectReturn, DirectReturn),
        (Hierarchical(), HostReturn, DirectReturn),
        (Derived(), HostReturn, DirectReturn),
        (Overriding(), OtherReturn, DirectReturn),
    ],
)
def test_return_path_is_the_nearest_class_s(dataflow: Routed, pooled: type, sequences: type) -> None:
    assert return_path_of(dataflow, is_pooled=True) is pooled
    assert return_path_of(dataflow, is_pooled=False) is sequences


def test_part_is_the_nearest_class_s() -> None:
    assert executor_of(Exchange()) is executor_of(Derived()) is executor_of(Silent()) is RoutedTables
    assert executor_of(Replicate()) is ReplicatedTables
    assert executor_of(Overriding()) is OtherTables


def test_dataflow_that_names_no_return_path_is_told() -> None:
    with pytest.raises(UnsupportedError, match=r"dataflow 'silent': Silent.return_path\(\) gave None"):
        return_path_of(Silent(), is_pooled=True)
