"""Any plan within memory, where hardly any is left over: dives from several budgets for what lies on every rank.

With each budget the program of patterns says whether there may be a plan, mostly within a second; from those with which
there may, dives begin (:mod:`~shardwright_plugins.proposers._dive`): the first as the program says, in the others
chance has a say. Options with gangs come last where there are others, since the program does not know of hosts.

Legend: K kinds of shards, O' options, T distinct tables, W ranks of hosts of L, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np
from attrs import define, field, frozen

from shardwright.planning.options import FREE, NO_GANG, Bools, Floats, Ints
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.bins import Bins
from shardwright_plugins.packing.knapsacks import NEGLIGIBLE
from shardwright_plugins.packing.limits import Effort
from shardwright_plugins.packing.neighbourhoods import without_time
from shardwright_plugins.packing.patience import turned
from shardwright_plugins.proposers._dive import Dive, Dived, Gang, few_gangs, gangs_of
from shardwright_plugins.proposers._dive_program import DiveProgram, Group
from shardwright_plugins.proposers._memory_budgets import Budgets
from shardwright_plugins.proposers._pattern_program import TOLERANCE, Kinds
from shardwright_plugins.proposers._patterns import whole_tables

# Kinds of shards at most; dives from each budget in all, and with as few gangs as can be before all gangs are allowed;
# those from the second on from the best budgets only, of which there are so many.
_MOST_KINDS, _MOST_DIVES, _DIVES, _MOST_AGAIN = 600, 12, 4, 4
# Cells of all linear programs together: some twenty seconds, and a second or two.
_EFFORT, LITTLE = 2e8, 1.5e7
# Turns of patience for what a dive leaves over by rounding, given up where more is left, divided by the turns.
_TURNS, _HOPELESS = 2, 0.1


def packed_by_dives(
    catalogue: Catalogue, limit_ms: float, is_over: Callable[[], bool], *, effort: float = _EFFORT
) -> Assignment | None:
    """A plan within all memories, or ``None`` if dives do not find one.

    Args:
        catalogue: of the space.
        limit_ms: the time that a plan may take.
        is_over: whether to end.
        effort: cells of all linear programs together, at most.
    """
    dives = _Dives(catalogue, limit_ms, is_over, Effort(effort))
    few, all_gangs = dives.levels()
    for first in range(0, _MOST_DIVES, _DIVES):
        for level in (few, all_gangs):
            for number in range(first, first + _DIVES):
                for entry in dives.nearest(level) if number else dives.possible(level):
                    found = dives.dived(entry, number)
                    if found is not None or dives.is_spent:
                        return found
    return None


@frozen(eq=False)
class _Entry:
    """Where dives begin: a budget for what lies on every rank, and what the program says of it.

    Args:
        kinds: of the shards.
        gangs: of each kind.
        is_allowed: the options that are open: ``[O']``.
        ranks: how many are needed.
        patterns: of any rank: ``[N, K]``.
    """

    kinds: Kinds
    gangs: Mapping[int, Gang]
    is_allowed: Bools
    ranks: float = np.inf
    patterns: Floats = field(factory=lambda: np.empty((0, 0)))


@define(eq=False)
class _Dives:
    """The dives of a space.

    Args:
        catalogue: of the space.
        limit_ms: the time that a plan may take.
        is_over: whether to end.
        effort: in cells of linear programs.
    """

    catalogue: Catalogue
    limit_ms: float
    is_over: Callable[[], bool]
    effort: Effort
    _budgets: Budgets = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._budgets = Budgets(without_time(self.catalogue.space))

    @property
    def is_spent(self) -> bool:
        """Whether nothing more is to be tried."""
        return self.effort.is_spent or self.is_over()

    def levels(self) -> tuple[list[_Entry], list[_Entry]]:
        """Where dives may begin: with as few gangs as can be, and with all where that are more."""
        multiplicity = self._budgets.space.options.multiplicity
        few, all_gangs = list[_Entry](), list[_Entry]()
        for budget in self._budgets.different():
            kinds = None if self.is_over() else self._budgets.kinds(budget, _MOST_KINDS)
            if kinds is None or (kinds.least_spread(multiplicity) > kinds.budget + TOLERANCE).any():
                continue
            gangs = gangs_of(self._budgets.space, kinds)
            if gangs is None:
                continue
            is_allowed = few_gangs(kinds, gangs)
            few.append(_Entry(kinds, gangs, is_allowed))
            if not is_allowed.all():
                all_gangs.append(_Entry(kinds, gangs, np.ones_like(is_allowed)))
        return few, all_gangs

    def possible(self, level: list[_Entry]) -> Iterator[_Entry]:
        """Those with which the program needs no more ranks than there are; the level has no others any more then."""
        begun, level[:] = list(level), []
        for entry in begun:
            program = self._program(entry)
            found = None if self.is_spent else program.solve()
            if found is not None:
                patterns = np.concatenate([group.patterns for group in program.groups])
                level.append(attrs.evolve(entry, ranks=found.ranks, patterns=patterns))
                yield level[-1]

    def nearest(self, level: list[_Entry]) -> list[_Entry]:
        """Those with which the fewest ranks are needed."""
        return sorted(level, key=lambda entry: entry.ranks)[:_MOST_AGAIN]

    def _program(self, entry: _Entry) -> DiveProgram:
        """The program of all tables on all ranks."""
        space, (num_kinds, dims) = self._budgets.space, entry.kinds.size.shape
        known = entry.patterns.reshape(-1, num_kinds)
        ranks = range(len(space.capacity_bytes))
        groups = [
            Group(list(ranks), np.ones(dims), most, known[(known <= most).all(axis=1)], np.zeros(0))
            for most in _apart(entry.kinds, entry.gangs)
        ]
        multiplicity, scarce = space.options.multiplicity, self._budgets.scarce
        return DiveProgram(entry.kinds, multiplicity, scarce, groups, self.effort, entry.is_allowed.copy())

    def dived(self, entry: _Entry, number: int) -> Assignment | None:
        """The plan of a dive; chance has no say in the first."""
        random = np.random.default_rng(number) if number else None
        program = self._program(entry)
        local = self.catalogue.space.topology.local_world_size
        found = Dive(entry.kinds, entry.gangs, local, program, random).run()
        if not found.is_whole:
            return None
        plan = seated(self.catalogue, entry.kinds, found, self.limit_ms)
        is_plan = np.isfinite(plan.value_ms) or turned(plan, range(_TURNS), self.is_over, hopeless=_HOPELESS)
        return plan if is_plan else None


def _apart(kinds: Kinds, gangs: Mapping[int, Gang]) -> list[Floats]:
    """Which shards are packed together: those of each tier where no shard takes of two; all, if there are gangs.

    A rank is as many bins then as there are tiers that are used.
    """
    takes = kinds.size > NEGLIGIBLE
    used = np.flatnonzero(takes.any(axis=0))
    if gangs or len(used) < 2 or (takes.sum(axis=1) > 1).any():
        return [np.full(len(kinds.size), np.inf)]
    return [np.where(takes[:, dimension], np.inf, 0.0) for dimension in used.tolist()]


def seated(catalogue: Catalogue, kinds: Kinds, dived: Dived, limit_ms: float) -> Assignment:
    """The plan that a dive made; what is left over is put where there is room.

    Args:
        catalogue: of the space.
        kinds: of the shards.
        dived: where the dive came to.
        limit_ms: the time that no rank should exceed.
    """
    alike = catalogue.space.options.alike
    result = Assignment(catalogue, whole_tables(dived.tables, kinds, alike), limit_ms)
    bins, kind = result.bins, kinds.kind_of[result.bins.kind]
    if bins.bins_per_host > 1:
        _seat_gangs(bins, kind, dived)
    alone = (bins.gang == NO_GANG) | (bins.bins_per_host == 1)
    for rank, shards in dived.held.items():
        for number in np.flatnonzero(shards).tolist():
            free = np.flatnonzero(alone & (kind == number) & (bins.bin == FREE))
            for item in free[: int(shards[number])].tolist():
                bins.put(item, rank)
    result.fill()
    return result


def _seat_gangs(bins: Bins, kind: Ints, dived: Dived) -> None:
    """Put gangs on their hosts, shards without a place where the dive has them."""
    gangs: dict[int, list[Sequence[int]]] = {}
    for members in bins.members.values():
        gangs.setdefault(int(kind[members[0]]), []).append(members)
    none = np.zeros(int(kind.max(initial=0)) + 1, dtype=np.int64)
    for number, hosts in dived.hosts.items():
        ranks = {
            first: np.repeat(
                mine := np.arange(first, first + bins.bins_per_host),
                [int(dived.held.get(rank, none)[number]) for rank in mine.tolist()],
            ).tolist()
            for first in set(hosts)
        }
        for first, members in zip(hosts, gangs.get(number, ()), strict=False):
            for item in members:
                place = int(bins.local[item])
                if place != FREE or ranks[first]:
                    bins.put(item, first + place if place != FREE else ranks[first].pop())
