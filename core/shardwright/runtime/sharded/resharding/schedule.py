"""Order in which tables move, and the memory that takes on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from attrs import field, frozen

from shardwright.runtime.sharded.resharding.blocks import TableMove
from shardwright.runtime.sharded.resharding.exchange import Window, pieces_of

LookupId: TypeAlias = tuple[int, int]
"""A lookup of one rank: its module's number, and its own."""

_BUFFERS = 3  # pieces in memory at once: what is sent, what is received, and what is cut out of a table


@frozen(eq=False)
class Stage:
    """A piece of tables' rows.

    Args:
        begun: tables that begin to move with it.
        windows: rows that move; none of tables that stay on their ranks.
        ended: tables all of whose rows have moved after it.
    """

    begun: Sequence[int]
    windows: Sequence[Window]
    ended: Sequence[int]


def stages_of(moves: Sequence[TableMove], is_moving: Sequence[bool], piece_bytes: int) -> Iterator[Stage]:
    """The stages of all tables: those that stay on their ranks first, each by itself.

    Args:
        moves: the tables.
        is_moving: mark of each table that goes to other blocks.
        piece_bytes: most that a rank sends or receives at once.
    """
    staying = [number for number, moving in enumerate(is_moving) if not moving]
    yield from (Stage([number], [], [number]) for number in staying)
    begun: set[int] = set()
    for piece in pieces_of(moves, is_moving, piece_bytes):
        own = [window.table for window in piece]
        first = [number for number in dict.fromkeys(own) if number not in begun]
        begun.update(first)
        ended = [window.table for window in piece if window.is_last]
        yield Stage(first, piece, ended)


@frozen(eq=False)
class MemoryPlan:
    """Bytes of each lookup of one rank, and the tables that it is of.

    Args:
        old: bytes of lookups that go.
        new: bytes of lookups that come.
        old_of: lookups that go, with blocks of each table.
        new_of: lookups that come, with blocks of each table.
        old_states: bytes that the user's optimizers keep of each table's old blocks.
        new_states: bytes that they keep of its new ones.
    """

    old: Mapping[LookupId, int] = field(factory=dict)
    new: Mapping[LookupId, int] = field(factory=dict)
    old_of: Mapping[int, AbstractSet[LookupId]] = field(factory=dict)
    new_of: Mapping[int, AbstractSet[LookupId]] = field(factory=dict)
    old_states: Mapping[int, int] = field(factory=dict)
    new_states: Mapping[int, int] = field(factory=dict)

    def peak_bytes(self, stages: Sequence[Stage], *, frees: bool) -> int:
        """Most that is there at a time beside what was there before.

        Args:
            stages: all stages, in order.
            frees: old blocks go as soon as their rows have left, and not at the end.
        """
        extra = peak = 0
        built: set[LookupId] = set()
        left = Departures(self.old_of)
        for stage in stages:
            for table in stage.begun:
                coming = set(self.new_of.get(table, ())) - built
                extra += sum(self.new[lookup] for lookup in coming) + self.new_states.get(table, 0)
                built |= coming
            peak = max(peak, extra + _BUFFERS * sum(window.num_bytes for window in stage.windows))
            for table in stage.ended if frees else ():
                extra -= self.old_states.get(table, 0)
                extra -= sum(self.old[lookup] for lookup in left.after(table))
        return peak


class Departures:
    """Old lookups that still have rows to send.

    Args:
        old_of: see :class:`MemoryPlan`.
    """

    def __init__(self, old_of: Mapping[int, AbstractSet[LookupId]]) -> None:
        self._old_of = old_of
        self._tables: dict[LookupId, set[int]] = {}
        for table, lookups in old_of.items():
            for lookup in lookups:
                self._tables.setdefault(lookup, set()).add(table)

    def after(self, table: int) -> list[LookupId]:
        """The lookups that have nothing left to send once a table has moved."""
        done = []
        for lookup in sorted(self._old_of.get(table, ())):
            self._tables[lookup].discard(table)
            if not self._tables[lookup]:
                done.append(lookup)
        return done
