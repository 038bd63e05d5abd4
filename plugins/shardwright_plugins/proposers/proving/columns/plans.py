"""Plans from patterns: the least time at which all tables need no more ranks than there are.

For a time, the program of patterns says how many ranks are needed. That number falls about as the time rises, so the
next time to try follows from the last ones (the secant method, on logarithms). Rounded down, the patterns place most
shards; the rest finds room in the ranks that are left.

Legend: A tables, K kinds of shards, O options, P patterns, W ranks of hosts of L, D dimensions.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field

from shardwright.planning.arrays import FREE, NO_GANG, Bools, Floats, Ints
from shardwright_plugins.proposers.proving.bounds.prover import Prover
from shardwright_plugins.proposers.proving.columns.kinds import Kinds, kinds_of, spread_of
from shardwright_plugins.proposers.proving.columns.master import Master, Patterns
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.packing.assignment import Assignment, Catalogue

# The steps of the secant method, in parts of the time; and of the way between a time with too few ranks and one with
# enough, the part that a step leaves on each side.
_LEAST_STEP, _MOST_STEP, _MARGIN = 0.004, 0.5, 0.15
# Options that a program begins with: those that cost least more than the best of their table at the bound's
# multipliers.
_MOST_OPTIONS = 80
_MOST_KNOWN = 500


@define(eq=False)
class ColumnSearch:
    """The search for such plans.

    Args:
        catalogue: catalogue of the space.
        prover: prover of the space's bounds.
        effort: amount of work that may be done.
        enough: part of the ranks that patterns are to need.
    """

    catalogue: Catalogue
    prover: Prover
    effort: Effort
    enough: float
    best: Assignment | None = None
    _spread: Floats = field(init=False)
    _usable: Bools = field(init=False)
    _price: Floats = field(init=False)
    _known: dict[bytes, Floats] = field(factory=dict)
    """Patterns by what tells their kinds apart: programs of other times begin with them."""

    def __attrs_post_init__(self) -> None:
        space, problem = self.catalogue.space, self.prover.relaxation
        self._spread = spread_of(space, problem.covers)
        is_free = np.logical_and.reduceat(space.options.rank == FREE, space.options.first_shard[:-1])
        self._usable = self.catalogue.is_efficient & (problem.covers | is_free)
        self._price = problem.cost + problem.share @ self.prover.multipliers

    @property
    def is_worth_it(self) -> bool:
        """True if there are so many tables alike, and so many ranks of one speed, that patterns are worth it."""
        space, effort = self.catalogue.space, self.effort
        is_many = len(space.capacity_bytes) >= effort.column_ranks and self.catalogue.num_classes == 1
        is_alike = len(space.options.all_tables) >= effort.column_alike * len(space.options.tables)
        return effort.has("columns") and is_many and is_alike

    def plan(self) -> Assignment | None:
        """The best plan of a few times; ``None`` if patterns find none."""
        effort, low = self.effort, (max(self.prover.bound_ms, 1e-12), 1 / self.enough)
        limit = self.prover.possible_ms * (1 + effort.ladder[0])
        for _ in range(effort.column_times):
            part = self._try(limit)
            if self.prover.watch.is_over:
                break
            if part is None or part > 1:
                low = max(low, (limit, 1 + _MOST_STEP if part is None else part))
            if self.best is None:
                limit *= 1 + float(np.clip((low[1] - 1) * 1.2, 2 * _LEAST_STEP, _MOST_STEP))
                continue
            high_ms = self.best.value_ms
            if high_ms <= low[0] * (1 + effort.narrow):
                break
            way = np.log(low[1]) / (np.log(low[1]) - np.log(self.enough))
            limit = low[0] * float((high_ms / low[0]) ** np.clip(way, _MARGIN, 1 - _MARGIN))
        return self.best

    def _try(self, limit_ms: float) -> float | None:
        """The part of the ranks that a time needs, less than 1 where a plan is found; ``None`` if no choice is."""
        budget = self._budget(limit_ms)
        kinds = None if budget is None else self._kinds(budget, limit_ms)
        patterns = None if kinds is None else self._patterns(kinds)
        if kinds is None or patterns is None:
            return None
        part = patterns.ranks / len(self.catalogue.space.capacity_bytes)
        if part <= 1 and self._holds_plan(kinds, patterns, limit_ms):
            return part
        return max(part, 1.0) / self.enough

    def _budget(self, limit_ms: float) -> Floats | None:
        """Compute the load of the options chosen at a time on every rank: ``[D]``; ``None`` for a refuted time."""
        choice = self.prover.choice(limit_ms)
        return None if choice is None else self._spread[choice].sum(axis=0)

    def _kinds(self, budget: Floats, limit_ms: float) -> Kinds | None:
        """The kinds of shards of the options that cost least more than the best of their table."""
        space, effort = self.catalogue.space, self.effort
        allowed = self._usable & (space.largest_cost_ms <= limit_ms)
        price = np.where(allowed, self._price, np.inf)
        regret = price - np.minimum.reduceat(price, space.options.first_option[:-1])[space.options.table]
        elsewhere = np.where(allowed & ~self.prover.relaxation.covers, regret, np.inf)
        cheap = allowed & self.prover.relaxation.covers
        cheap[np.argsort(elsewhere, kind="stable")[:_MOST_OPTIONS]] = True
        return kinds_of(space, allowed & cheap, self._spread, budget, limit_ms, effort.column_kinds)

    def _patterns(self, kinds: Kinds) -> Patterns | None:
        key = kinds.kind_of.tobytes()
        known = self._known.get(key, np.empty((0, len(kinds.size))))
        master = Master(kinds, self.catalogue.space.options.multiplicity, known)
        world_size = len(self.catalogue.space.capacity_bytes)
        enough = self.enough * world_size
        found = master.solve(enough, world_size, self.effort, self.prover.watch)
        self._known[key] = master.patterns[-_MOST_KNOWN:]
        return found

    def _holds_plan(self, kinds: Kinds, patterns: Patterns, limit_ms: float) -> bool:
        """True if all shards find room within about a time; the plan is kept if it is best."""
        alike, effort = self.catalogue.space.options.distinct_table, self.effort
        found = Assignment(self.catalogue, _whole_tables(patterns.tables, kinds, alike), limit_ms)
        _Placing(found, kinds).place(patterns)
        found.fill()
        found.bins.repair(effort.few_moves)
        if np.isfinite(found.value_ms) and (self.best is None or found.value_ms < self.best.value_ms):
            self.best = found
        return found.value_ms <= limit_ms * (1 + 1e-3)


def _whole_tables(tables: Floats, kinds: Kinds, alike: Ints) -> Ints:
    """The option of each of all tables, so that about as many take each as the program says: ``[A]``."""
    proposal = np.zeros(len(alike), dtype=np.int64)
    for table in range(int(kinds.table[-1]) + 1):
        mine, members = np.flatnonzero(kinds.table == table), np.flatnonzero(alike == table)
        number = np.floor(tables[mine] + 1e-4).astype(np.int64)
        number = np.minimum(number, np.maximum(len(members) - np.cumsum(number) + number, 0))
        rest = np.argsort(number - tables[mine], kind="stable")
        left = len(members) - int(number.sum())
        number[rest[:left]] += 1
        number[rest[0]] += max(left - len(rest), 0)
        proposal[members] = np.repeat(kinds.options[mine], number)
    return proposal


class _Placing:
    """Shards put into ranks as patterns say, those with most ranks first; what is left over is left out.

    A pattern with shards of gangs takes a host.

    Args:
        plan: none of its shards in a rank.
        kinds: kinds of the shards.
    """

    def __init__(self, plan: Assignment, kinds: Kinds) -> None:
        self._bins, self._kinds = plan.bins, kinds
        kind = kinds.kind_of[self._bins.kind]
        alone = self._bins.gang == NO_GANG
        self._alone = [np.flatnonzero(alone & (kind == k)).tolist()[::-1] for k in range(len(kinds.size))]
        self._gangs: list[list[int]] = [[] for _ in range(len(kinds.size))]
        for gang, members in self._bins.members.items():
            if len(members) <= self._bins.bins_per_host:
                self._gangs[kind[members[0]]].append(gang)
        self._free = list(range(len(self._bins.used)))[::-1]

    def place(self, patterns: Patterns) -> None:
        """Place as many shards as the patterns hold."""
        size, free, left = self._bins.bins_per_host, self._free, patterns.number.copy()
        has_gang = patterns.shards[:, self._kinds.is_gang].any(axis=1)
        while len(free) >= size and (left[has_gang] >= 0.5 * size).any():
            index = int(np.argmax(np.where(has_gang, left, -1.0)))
            left[index] -= size
            ranks = free[-size:][::-1]
            if self._put_gangs(patterns.shards[index], ranks[0]):
                del free[-size:]
                for rank in ranks:
                    self._put_alone(patterns.shards[index], rank)
        while free and (left > 1e-3).any():
            index = int(np.argmax(left))
            left[index] -= 1
            self._put_alone(patterns.shards[index], free.pop())

    def _put_gangs(self, shards: Ints, first: int) -> bool:
        """Put gangs of each kind on a host until each rank holds so many shards of it; whether there was one."""
        is_some = False
        for kind in np.flatnonzero(self._kinds.is_gang & (shards > 0)).tolist():
            for _ in range(int(shards[kind])):
                is_some |= self._put_across(self._gangs[kind], first)
        return is_some

    def _put_across(self, gangs: list[int], first: int) -> bool:
        """Put a gang, or several that are smaller than a host side by side, on the ranks of a host."""
        taken = 0
        while gangs and taken + len(self._bins.members[gangs[-1]]) <= self._bins.bins_per_host:
            members = self._bins.members[gangs.pop()]
            for place, item in enumerate(members):
                local = int(self._bins.local[item])
                self._bins.put(item, first + (taken + place if local == FREE else local))
            taken += len(members) if self._bins.local[members[0]] == FREE else self._bins.bins_per_host
        return taken > 0

    def _put_alone(self, shards: Ints, rank: int) -> None:
        for kind in np.flatnonzero(~self._kinds.is_gang & (shards > 0)).tolist():
            for _ in range(min(int(shards[kind]), len(self._alone[kind]))):
                self._bins.put(self._alone[kind].pop(), rank)
