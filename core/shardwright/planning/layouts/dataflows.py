"""Dataflows: how ids reach the blocks of a layout, and how partial results return. Nothing here imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from attrs import frozen


class Dataflow(ABC):
    """Path of ids to the blocks of a layout, and of partial results back.

    A descriptor: a frozen attrs class of plain data, hashable. Its methods name what runs it, and import that when
    they are called. Most dataflows are :class:`Routed`; others bring a :class:`shardwright.Executor`.
    """

    name: ClassVar[str]
    is_replicated: ClassVar[bool] = False
    """True if every rank has a copy of the whole table and looks up its own batch there."""
    sums_inside_host: ClassVar[bool] = False
    """True if partial sums are added inside a host before they cross to others."""

    @abstractmethod
    def executor(self) -> type[Any] | None:
        """The :class:`shardwright.Executor` that runs all tables of a module with such a dataflow.

        ``None``: core's, which only a :class:`Routed` one may return.
        """


class Routed(Dataflow):
    """Ids are sent to the ranks that own their rows; what differs is the path of results."""

    def executor(self) -> type[Any] | None:  # noqa: D102
        return None

    @abstractmethod
    def return_path(self, *, is_pooled: bool) -> type[Any] | None:
        """The path of results, and of gradients in the other direction; tables of one path share collectives.

        Args:
            is_pooled: one result per bag, a partial sum where rows are cut; else one per id.

        Returns:
            A :class:`shardwright.ReturnPath`, or whatever makes one when it is called; ``None``: the direct one,
            :class:`shardwright.DirectReturn`.
        """


@frozen
class Exchange(Routed):
    """Pooled partial sums are sent straight to the rank that asked, and added there."""

    name: ClassVar[str] = "exchange"

    def return_path(self, *, is_pooled: bool) -> type[Any] | None:  # noqa: D102
        return None


DATAFLOWS: tuple[type[Dataflow], ...] = (Exchange,)
