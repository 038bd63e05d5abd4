"""Dataflows: how ids reach the blocks of a layout, and how partial results return. Nothing here imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from attrs import frozen


class Dataflow(ABC):
    """Path of ids to the blocks of a layout, and of partial results back.

    A descriptor: a frozen attrs class of plain data, hashable. The runtime knows the executors of core's own
    dataflows by their classes. A plugin's dataflow names its executor in the methods below, which import it
    when called. Most dataflows are :class:`Routed`; others bring an
    :class:`shardwright.runtime.step.executor.Executor` of their own.
    """

    name: ClassVar[str]
    is_replicated: ClassVar[bool] = False
    """True if every rank has a copy of the whole table and looks up its own batch there."""
    sums_inside_host: ClassVar[bool] = False
    """True if partial sums are added inside a host before they cross to others."""

    @abstractmethod
    def executor(self) -> type[Any] | None:
        """The :class:`shardwright.Executor` that runs all tables of a module with such a dataflow.

        ``None``: the one that runs the class this one derives from.
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
            A :class:`shardwright.ReturnPath`, or whatever makes one when it is called; ``None``: that of the class it
            derives from.
        """


@frozen
class Exchange(Routed):
    """Pooled partial sums are sent straight to the rank that asked, and added there."""

    name: ClassVar[str] = "exchange"

    def return_path(self, *, is_pooled: bool) -> type[Any] | None:  # noqa: D102
        return None


@frozen
class Hierarchical(Routed):
    """Partial sums are added inside the host that holds a table's row parts, then cross to other hosts.

    The row parts of a column block must be on ranks of one host. Sequence results, which are not added, go straight.
    """

    name: ClassVar[str] = "hierarchical"
    sums_inside_host: ClassVar[bool] = True

    def return_path(self, *, is_pooled: bool) -> type[Any] | None:  # noqa: D102
        return None


@frozen
class Replicate(Dataflow):
    """Every rank has a copy and looks up its own batch; updates are synchronised in the backward pass.

    A layout lists the copies: one block of all rows and columns for each rank.

    Example:
        >>> import shardwright as sw
        >>> rows, columns = sw.RowsRange(10), sw.ColumnRange(0, 8)
        >>> layout = sw.Layout(
        ...     [sw.BlockRun(rows, columns, count=4, is_copied=True, rank=0)], dataflow=sw.Replicate()
        ... )
        >>> layout.dataflow.name
        'replicate'
    """

    name: ClassVar[str] = "replicate"
    is_replicated: ClassVar[bool] = True

    def executor(self) -> type[Any] | None:  # noqa: D102
        return None


DATAFLOWS: tuple[type[Dataflow], ...] = (Exchange, Hierarchical, Replicate)
