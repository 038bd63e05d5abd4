"""Agreement of a plan's shards with the sharding type that the plan names.

A plan may be edited by hand, and cut a table where no planner would: at other rows, into other widths, on other ranks.
But the name of the sharding type stands for a way to cut and a dataflow, and shards that are of another kind contradict
it. A type may look at all of a table and of what is asked of it: both must be what they were when it was planned.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import attrs
from attrs import field, frozen

from shardwright.contracts.sharding_type import ShardingType
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.offers import LayoutOffer, shape_key
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.watch import Watch


@frozen
class _Character:
    """Features that all layouts of a sharding type share, whatever the sizes."""

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

    def is_kept_by(self, other: _Character, num_hosts: int) -> bool:
        """True if shards of another character, on so many hosts, are of this one too."""
        mine, theirs = ((one.cuts_rows, one.cuts_columns, one.dataflow) for one in (self, other))
        return mine == theirs and (num_hosts == 1 or not self.shares_host)

    def __str__(self) -> str:
        rows = "cuts rows" if self.cuts_rows else "keeps rows whole"
        columns = "cuts columns" if self.cuts_columns else "keeps columns whole"
        host = ", stays on one host" if self.shares_host else ""
        return f"{rows}, {columns}, dataflow {self.dataflow!r}{host}"


@frozen(eq=False)
class Agreement:
    """Compares the shards of tables with what their sharding types make; a type is asked the same only once.

    Args:
        topology: the ranks.
    """

    topology: Topology
    _known: dict[Hashable, frozenset[_Character]] = field(factory=dict, init=False)

    def disagreement(
        self, kind: ShardingType, table: TableSpec, layout: Layout, rule: ParameterConstraints
    ) -> str:
        """Explain how a table's shards contradict the sharding type that the plan names; empty if they do not.

        Args:
            kind: the sharding type named.
            table: the table, as it was planned.
            layout: its shards, each on a rank.
            rule: constraints under which it was planned.

        Returns:
            A sentence that names the type, or nothing: also where the type makes no layout of this table here, so that
            there is nothing to compare with.

        Raises:
            PlanningError: the type failed, or broke its contract.
        """
        found = _Character.of(layout, table.embedding_dim)
        hosts = {self.topology.host_of(rank) for rank in set(layout.ranks) if rank is not None}
        offered: frozenset[_Character] = frozenset()
        for asked in _asked(kind, table, layout, rule):
            offered |= self._characters(kind, table, asked)
            if any(one.is_kept_by(found, len(hosts)) for one in offered):
                return ""
        if not offered:
            return ""
        expected = " or ".join(sorted({str(one) for one in offered}))
        if any(one.is_kept_by(found, 1) for one in offered):
            return f"sharding type {kind.name!r} {expected}; the shards are on {len(hosts)} hosts"
        return f"sharding type {kind.name!r} {expected}; the table's {len(layout.blocks)} shards: {found}"

    def _characters(
        self, kind: ShardingType, table: TableSpec, rule: ParameterConstraints
    ) -> frozenset[_Character]:
        """Collect the characters of the layouts that the type makes of the table."""
        key = (kind.name, *identity(kind, table, rule))
        if key not in self._known:
            offer = LayoutOffer.of(kind, table, self.topology, rule, Watch().go_on)
            self._known[key] = frozenset(
                _Character.of(layout, table.embedding_dim) for layout, _ in offer.layouts
            )
        return self._known[key]


def _asked(
    kind: ShardingType, table: TableSpec, layout: Layout, rule: ParameterConstraints
) -> Iterator[ParameterConstraints]:
    """Yield demands to ask the type by name: the original, then blocks as narrow as these, then whole ones."""
    named = attrs.evolve(rule, sharding_types=(kind.name,))
    yield named
    columns = layout.columns
    num_cuts = max(2, len(set(zip(columns.start.tolist(), columns.stop.tolist(), strict=True))))
    for width in (max(1, table.embedding_dim // num_cuts), table.embedding_dim):
        yield attrs.evolve(named, min_partition=width)


def identity(kind: ShardingType, table: TableSpec, rule: ParameterConstraints) -> tuple[Hashable, ...]:
    """Return a key of a table; equal for tables that are alike to a sharding type."""
    if not kind.depends_on_shape_only:
        return table, rule
    return shape_key(table), rule.min_partition, rule.device_group
