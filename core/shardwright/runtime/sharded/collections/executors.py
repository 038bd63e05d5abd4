"""Executors of core's dataflows, by class; a plugin's dataflow names its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shardwright.errors import UnsupportedError
from shardwright.planning.layouts.layout import Dataflow, Replicate, Routed
from shardwright.runtime.replicated.tables import ReplicatedTables
from shardwright.runtime.routed.tables import RoutedTables
from shardwright.runtime.step.executor import Executor

_EXECUTORS: Final[Mapping[type, type[Executor]]] = {Routed: RoutedTables, Replicate: ReplicatedTables}


def executor_of(dataflow: Dataflow) -> type[Executor]:
    """The executor class of all tables of a module with such a dataflow.

    Raises:
        UnsupportedError: neither the dataflow nor a class that it derives from names an executor.
    """
    own = dataflow.executor()
    if own is not None:
        return own
    for owner in type(dataflow).__mro__:
        if owner in _EXECUTORS:
            return _EXECUTORS[owner]
    raise UnsupportedError(
        f"dataflow {dataflow.name!r}: {type(dataflow).__qualname__}.executor() gave None, which only a class "
        "derived from Routed or Replicate may; return an Executor"
    )
