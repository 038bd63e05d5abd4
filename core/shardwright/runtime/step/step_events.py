"""The events of one collection, told to all listeners that plugins offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.contracts.extension import StepListener, TrainedCollection
from shardwright.host.extensions import ask_at, words_at
from shardwright.host.plugin_host import host
from shardwright.planning.tables.spec import TableSpec


def step_listeners() -> list[StepListener]:
    """The listeners of all extensions at the point ``step``."""
    offered = host().extensions
    return [ask_at("step", word, offered, StepListener) for word in words_at("step", offered)]


class StepEvents:
    """The events of one collection.

    Args:
        collection: the collection.

    Attributes:
        num_updates: number that grows with each backward pass.
    """

    def __init__(self, collection: TrainedCollection) -> None:
        self.collection, self.num_updates = collection, 0
        self._listeners = step_listeners()

    def begins(self, parameters: Sequence[tuple[str, Any, bool]]) -> None:
        """Tell that a lookup with gradients begins."""
        for listener in self._listeners:
            listener.begins(self.collection, parameters)

    def updates(self, forward: Any) -> None:
        """Tell that gradients of a forward pass have come."""
        self.num_updates += 1
        for listener in self._listeners:
            listener.updates(self.collection, forward)

    def steps(self) -> None:
        """Tell that the optimizer begins its step."""
        for listener in self._listeners:
            listener.steps(self.collection)

    def drops(self) -> None:
        """Tell that gradients are dropped."""
        for listener in self._listeners:
            listener.drops(self.collection)


def trained_collection(
    tables: Sequence[TableSpec],
    updated: Sequence[TableSpec],
    has_gradients: Callable[[], bool],
    device_type: str,
) -> TrainedCollection:
    """A collection as listeners know it.

    Args:
        tables: its tables.
        updated: tables whose kernels run their optimizer.
        has_gradients: function that tells if gradients are kept for the optimizer's step now.
        device_type: type of the device of its tables.
    """
    at_once = [table for table in updated if table.update == "in_backward"]
    return TrainedCollection(
        at_once[0].describe() if at_once else "",
        all(table.optimizer is not None and table.optimizer.adds_up for table in at_once),
        [table.describe() for table in updated if table.update == "in_step"],
        has_gradients,
        next((table.describe() for table in tables if table.max_gradient is not None), ""),
        device_type,
    )
