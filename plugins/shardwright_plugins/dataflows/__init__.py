"""The dataflows of built-in sharding types beside core's :class:`shardwright.Exchange`, for other sharding types too.

Nothing here imports torch: what runs a dataflow is imported when a module is sharded.

Example:
    >>> import shardwright as sw
    >>> from shardwright_plugins.dataflows import Replicate
    >>> rows, columns = sw.RowsRange(10), sw.ColumnRange(0, 8)
    >>> layout = sw.Layout([sw.BlockRun(rows, columns, count=4, is_copied=True, rank=0)], dataflow=Replicate())
    >>> layout.dataflow.name
    'replicate'
"""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import frozen

from shardwright.planning.layouts.layout import Dataflow, Routed

__all__ = ["Hierarchical", "Replicate"]


@frozen
class Hierarchical(Routed):
    """Partial sums are added inside the host that holds a table's row parts, then cross to other hosts.

    The row parts of a column block must be on ranks of one host. Sequence results, which are not added, go straight.
    """

    name: ClassVar[str] = "hierarchical"
    sums_inside_host: ClassVar[bool] = True

    def return_path(self, *, is_pooled: bool) -> type[Any] | None:  # noqa: D102
        from shardwright_plugins.dataflows.host_sums import HostReturn

        return HostReturn if is_pooled else None


@frozen
class Replicate(Dataflow):
    """Every rank has a copy and looks up its own batch; updates are synchronised in the backward pass.

    A layout lists the copies: one block of all rows and columns for each rank.
    """

    name: ClassVar[str] = "replicate"
    is_replicated: ClassVar[bool] = True

    def executor(self) -> type[Any]:  # noqa: D102
        from shardwright_plugins.dataflows.replicated.tables import ReplicatedTables

        return ReplicatedTables
