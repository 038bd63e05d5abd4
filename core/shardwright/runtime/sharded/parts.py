"""What runs the tables of core's dataflows, by class; a plugin's dataflow names its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shardwright.errors import UnsupportedError
from shardwright.planning.layouts.layout import Dataflow, Replicate, Routed
from shardwright.runtime.replicated.tables import ReplicatedTables
from shardwright.runtime.routed.tables import RoutedTables
from shardwright.runtime.step.part import Part

_PARTS: Final[Mapping[type, type[Part]]] = {Routed: RoutedTables, Replicate: ReplicatedTables}


def part_of(dataflow: Dataflow) -> type[Part]:
    """What runs all tables of a module that ask for such a dataflow.

    Raises:
        UnsupportedError: it names no part, and neither does a class that it derives from.
    """
    own = dataflow.part()
    if own is not None:
        return own
    for owner in type(dataflow).__mro__:
        if owner in _PARTS:
            return _PARTS[owner]
    raise UnsupportedError(
        f"dataflow {dataflow.name!r}: {type(dataflow).__qualname__}.part() gave None, which only a class derived from "
        "Routed or Replicate may; return a Part"
    )
