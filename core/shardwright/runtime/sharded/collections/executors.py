"""The executor of a dataflow: its own, or core's for routed tables."""

from __future__ import annotations

from shardwright.errors import UnsupportedError
from shardwright.planning.layouts.layout import Dataflow, Routed
from shardwright.runtime.routed.tables import RoutedTables
from shardwright.runtime.step.executor import Executor


def executor_of(dataflow: Dataflow) -> type[Executor]:
    """The executor class of all tables of a module with such a dataflow.

    Raises:
        UnsupportedError: it names none and is not routed.
    """
    own = dataflow.executor()
    if own is None and not isinstance(dataflow, Routed):
        raise UnsupportedError(
            f"dataflow {dataflow.name!r}: {type(dataflow).__qualname__}.executor() gave None, which only a class "
            "derived from Routed may; return an Executor"
        )
    return own or RoutedTables
