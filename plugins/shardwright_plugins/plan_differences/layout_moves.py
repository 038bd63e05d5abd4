"""Rows and columns that go from the blocks of one layout to those of another, by the layouts alone.

Every rank computes the same flows in the same order, so that sender and receiver agree without a word. Nothing here
imports torch.

Legend: R rows of a table, D its columns, W ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from attrs import frozen

from shardwright.planning.layouts.blocks import Block, ColumnRange
from shardwright.planning.layouts.layout import Layout
from shardwright_plugins.plan_differences.shared_rows import SharedRowCounts


@frozen(eq=False)
class Flow:
    """Rows and columns that a block of the new layout gets from one of the old.

    Args:
        source: block of the old layout; of copies, the one that is sent.
        target: block of the new layout.
        columns: columns of the table that both have; ``None`` if they have none in common, and only what is kept once
            a row travels.
    """

    source: Block
    target: Block
    columns: ColumnRange | None

    @property
    def carries_row_values(self) -> bool:
        """Mark of flows that carry values of which a row has one: the block with the first column sends them."""
        return self.source.columns.start == 0


@frozen(eq=False, slots=False)
class LayoutMove:
    """A table on its way from one layout to another.

    Args:
        old: the layout that it has.
        new: the layout that it gets.
        has_row_values: there are values of which a row has one, so that every block needs them.
    """

    old: Layout
    new: Layout
    has_row_values: bool = False

    @cached_property
    def is_same_map(self) -> bool:
        """Mark of layouts that part rows alike."""
        return self.old.row_map == self.new.row_map

    @cached_property
    def _targets(self) -> list[Block]:
        return [block for block in self.new.blocks if block.num_rows]

    @cached_property
    def shared_rows(self) -> SharedRowCounts:
        """Counts of rows that parts of both row maps have."""
        return SharedRowCounts(self.new.row_map)

    def num_cells(self, flow: Flow) -> tuple[int, int]:
        """Count what a flow carries: elements of the table, and values of which a row has one."""
        rows = self.shared_rows.of(flow.source.rows, flow.target.rows)
        return rows * len(flow.columns or ()), rows * flow.carries_row_values

    @cached_property
    def _sources(self) -> list[tuple[list[Block], list[int]]]:
        """The blocks of the old layout, copies together; and the ranks that have them."""
        holders: dict[tuple[int, int, int], list[Block]] = {}
        for block in self.old.blocks:
            if not block.num_rows:
                continue
            place = (block.rows.index, block.columns.start, block.columns.stop)
            is_copy = self.old.dataflow_of(block).is_replicated
            holders.setdefault(place if is_copy else (*place, block.rank), []).append(block)  # type: ignore[arg-type]
        return [(copies, [_rank(block) for block in copies]) for copies in holders.values()]

    def flows(self, rank: int | None = None) -> Iterator[Flow]:
        """The flows from or to a rank, in the order that all ranks have; of all ranks by default.

        A rank that has a copy of what it needs takes its own; other ranks share the copies among them.
        """
        targets = self._targets
        mine = targets if rank is None else [block for block in targets if block.rank == rank]
        for copies, holders in self._sources:
            place_of = {holder: place for place, holder in enumerate(holders)}
            for target in targets if rank is None or rank in place_of else mine:
                to = _rank(target)
                source = copies[place_of.get(to, to % len(copies))]
                if rank is not None and rank not in (source.rank, to):
                    continue
                columns = _common_columns(source, target)
                if columns is None and not (self.has_row_values and source.columns.start == 0):
                    continue
                if self._have_rows_in_common(source, target):
                    yield Flow(source, target, columns)

    def _have_rows_in_common(self, source: Block, target: Block) -> bool:
        """Ask whether two blocks may have rows in common, by their bounds alone."""
        if self.is_same_map:
            return source.rows.index == target.rows.index
        if self.old.row_map.takes_any_id or self.new.row_map.takes_any_id:
            return True  # where a key is, bounds do not say
        old, new = source.rows.bounds, target.rows.bounds
        return old is None or new is None or (old[0] < new[1] and new[0] < old[1])

    @property
    def longest(self) -> int:
        """Rows of the largest block of the old layout."""
        return max((copies[0].num_rows for copies, _ in self._sources), default=0)

    @cached_property
    def rows_at_once(self) -> int:
        """Rows of the table that one rank may send or receive for each local row of a window: an upper limit."""
        own = Counter(rank for _, holders in self._sources for rank in set(holders))
        to = Counter((block.rows.index, block.columns.start) for block in self._targets)
        parts = len({copies[0].rows.index for copies, _ in self._sources})
        return max(parts, max(own.values(), default=1) * max(to.values(), default=1))


def _common_columns(one: Block, other: Block) -> ColumnRange | None:
    start, stop = max(one.columns.start, other.columns.start), min(one.columns.stop, other.columns.stop)
    return ColumnRange(start, stop) if start < stop else None


def _rank(block: Block) -> int:
    assert block.rank is not None  # a plan's blocks have ranks
    return block.rank
