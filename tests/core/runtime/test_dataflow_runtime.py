"""What runs a dataflow: what it names, or core's."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen

from shardwright import Dataflow, DirectReturn, Exchange, Routed, UnsupportedError
from shardwright.runtime.routed.tables import RoutedTables, executor_of, return_path_of
from shardwright_plugins.dataflows import Hierarchical, Replicate
from shardwright_plugins.dataflows.host_sums import HostReturn
from shardwright_plugins.dataflows.replicated.tables import ReplicatedTables


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


@frozen
class Mute(Dataflow):
    name = "mute"

    def executor(self) -> Any:
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


def test_executor_is_the_dataflow_s_own_or_core_s() -> None:
    assert executor_of(Exchange()) is executor_of(Derived()) is executor_of(Silent()) is RoutedTables
    assert executor_of(Replicate()) is ReplicatedTables
    assert executor_of(Overriding()) is OtherTables


def test_dataflow_that_is_not_routed_must_name_an_executor() -> None:
    with pytest.raises(UnsupportedError, match=r"dataflow 'mute': Mute.executor\(\) gave None"):
        executor_of(Mute())
