"""Dataflows: how ids reach the blocks of a layout, and how partial results come home. Nothing here imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from shardwright.runtime.routed.return_path import ReturnPath
    from shardwright.runtime.step.part import Part


class Dataflow(ABC):
    """How ids reach the blocks of a layout and how partial results come home.

    A descriptor: a frozen attrs class of plain data, hashable, that imports its runtime only when asked. Most
    dataflows are :class:`Routed`; others bring a :class:`shardwright.runtime.step.part.Part` of their own.
    """

    name: ClassVar[str]
    is_replicated: ClassVar[bool] = False
    """Whether every rank has a copy of the whole table and looks up its own batch there."""
    sums_inside_host: ClassVar[bool] = False
    """Whether partial sums are added inside a host before they cross to others."""

    @abstractmethod
    def part(self) -> type[Part]:
        """What runs all tables of a module that ask for such a dataflow (imports torch)."""


class Routed(Dataflow):
    """Ids are sent to the ranks that own their rows; what differs is the way results take home."""

    def part(self) -> type[Part]:  # noqa: D102
        from shardwright.runtime.routed.tables import RoutedTables

        return RoutedTables

    @abstractmethod
    def return_path(self, *, is_pooled: bool) -> type[ReturnPath]:
        """The way results take home, and gradients back; tables with one way share its collectives.

        Args:
            is_pooled: one result per bag, a partial sum where rows are cut; else one per id.
        """


@frozen
class Exchange(Routed):
    """Pooled partial sums are sent straight to the rank that asked, and added there."""

    name: ClassVar[str] = "exchange"

    def return_path(self, *, is_pooled: bool) -> type[ReturnPath]:  # noqa: D102
        from shardwright.runtime.routed.direct import DirectReturn

        return DirectReturn


@frozen
class Hierarchical(Routed):
    """Partial sums are added inside the host that holds a table's row parts, then cross to other hosts.

    The row parts of a column block must be on ranks of one host. Sequence results, which are not added, go straight.
    """

    name: ClassVar[str] = "hierarchical"
    sums_inside_host: ClassVar[bool] = True

    def return_path(self, *, is_pooled: bool) -> type[ReturnPath]:  # noqa: D102
        from shardwright.runtime.routed.direct import DirectReturn
        from shardwright.runtime.routed.hierarchical import HostReturn

        return HostReturn if is_pooled else DirectReturn


@frozen
class Replicate(Dataflow):
    """Every rank has a copy and looks up its own batch; updates are synchronised in the backward pass.

    A layout lists the copies: one block of all rows and columns for each rank.
    """

    name: ClassVar[str] = "replicate"
    is_replicated: ClassVar[bool] = True

    def part(self) -> type[Part]:  # noqa: D102
        from shardwright.runtime.replicated.tables import ReplicatedTables

        return ReplicatedTables


DATAFLOWS: tuple[type[Dataflow], ...] = (Exchange, Hierarchical, Replicate)
