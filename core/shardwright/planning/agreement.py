"""Whether the shards of a plan are such as their sharding type makes.

A plan may be edited by hand, and cut a table where no planner would: at other rows, into other widths, on other ranks.
But the name of the sharding type stands for a way to cut and a dataflow, and shards that are of another kind contradict
it.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from shardwright.contracts.sharding_type import ShardingType
from shardwright.planning.constraints import ParameterConstraints
from shardwright.planning.layouts import Layout
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology


@frozen
class _Character:
    """What is common to the layouts of a sharding type, whatever the sizes."""

    cuts_rows: bool
    cuts_columns: bool
    dataflow: str
    shares_host: bool

    @classmethod
    def of(cls, layout: Layout, dim: int) -> _Character:
        return cls(
            layout.cuts_rows,
            layout.blocks[0].num_columns < dim,
            " and ".join(sorted(dataflow.name for dataflow in layout.dataflows)),
            all(block.host_group == 0 for block in layout.blocks),
        )

    def __str__(self) -> str:
        rows = "cuts rows" if self.cuts_rows else "keeps rows whole"
        columns = "cuts columns" if self.cuts_columns else "keeps columns whole"
        host = ", stays on one host" if self.shares_host else ""
        return f"{rows}, {columns}, dataflow {self.dataflow!r}{host}"


def disagreement(kind: ShardingType, table: TableSpec, layout: Layout, topology: Topology) -> str:
    """How a table's shards contradict the sharding type that the plan names; empty if they do not.

    Args:
        kind: the sharding type named.
        table: the table.
        layout: its shards, each on a rank.
        topology: the ranks.

    Returns:
        A sentence that names the type, or nothing: also where the type makes no layout of this table here, so that
        there is nothing to compare with.
    """
    offered = _characters(kind, table, layout, topology)
    found = _Character.of(layout, table.embedding_dim)
    hosts = {topology.host_of(rank) for rank in set(layout.ranks) if rank is not None}
    alike = [
        one
        for one in offered
        if (one.cuts_rows, one.cuts_columns, one.dataflow)
        == (found.cuts_rows, found.cuts_columns, found.dataflow)
    ]
    if not offered or any(not one.shares_host or len(hosts) == 1 for one in alike):
        return ""
    expected = " or ".join(sorted({str(one) for one in offered}))
    if alike:
        return f"sharding type {kind.name!r} {expected}; the shards are on {len(hosts)} hosts"
    return f"sharding type {kind.name!r} {expected}; the table's {len(layout.blocks)} shards: {found}"


def _characters(
    kind: ShardingType, table: TableSpec, layout: Layout, topology: Topology
) -> Iterable[_Character]:
    """What the sharding type would do with the table, asked for by name: with blocks as narrow as these, and whole."""
    if kind.supports(table, topology) is not True:
        return ()
    columns = layout.columns
    narrowest = min(int((columns.stop - columns.start).min()), max(1, table.embedding_dim // 2))
    rules = (
        ParameterConstraints(sharding_types=(kind.name,), min_partition=columns)
        for columns in (narrowest, table.embedding_dim)
    )
    return {
        _Character.of(made, table.embedding_dim)
        for rule in rules
        for made in kind.layouts(table, topology, rule)
    }
