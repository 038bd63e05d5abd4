"""Many equal tables over many ranks: which options, and which shards lie together, by column generation.

Where tables are alike, what matters is not which shard lies where but how many ranks hold which *pattern*: so many
shards of each kind that fit into a rank together. The least number of ranks for all tables, within a time, is a
linear program over how many tables take each option and how many ranks hold each pattern; its columns are made as
they are needed (Gilmore and Gomory 1961). Rounded down, it places most shards; the rest finds room in the ranks that
are left.

Legend: K kinds of shards, O' options, T distinct tables, P patterns, W ranks of hosts of L, D dimensions (time,
memory tiers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from attrs import frozen

from shardwright.planning.options import FREE, NO_GANG, Bools, Floats, Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.bins import Bins
from shardwright_plugins.proposers._few_options import FewOptions
from shardwright_plugins.proposers._pattern_program import (
    TOLERANCE,
    HostPattern,
    Kinds,
    Pattern,
    Program,
    Solution,
)

# Kinds of shards at most: the work grows with their square.
MOST_KINDS = 120
# Patterns of one program that the next begins with.
_MOST_KEPT = 500
# So often, options that a program is short of are added to it.
_MOST_GROWTHS = 2


def spread_of(space: SearchSpace, covers: Bools) -> Floats:
    """What each option takes of every rank, time and memory: ``[O, D]``; 0 where it does not put one shard on each."""
    needs = np.column_stack([space.cost_ms, space.memory_bytes])
    return np.where(covers[:, None], np.maximum.reduceat(needs, space.options.first_shard[:-1]), 0.0)


def kinds_of(
    space: SearchSpace,
    allowed: Bools,
    spread: Floats,
    budget: Floats,
    limit_ms: float,
    most_kinds: int = MOST_KINDS,
) -> Kinds | None:
    """The kinds of shards of some options; ``None`` if there are too many, or no room beside the spread load.

    Args:
        space: options and costs.
        allowed: the options, which put one shard on every rank, or shards that have no rank: ``[O]``.
        spread: what each takes of every rank: ``[O, D]``.
        budget: the spread load at most: ``[D]``.
        limit_ms: the time.
        most_kinds: how many are not too many.
    """
    options = space.options
    limit = np.append(limit_ms, space.capacity_bytes.min(axis=0))
    room = np.maximum(limit - budget, 0.0)
    needs, count = _needs(space)
    usable = allowed.copy()
    run = np.flatnonzero((options.rank == FREE) & usable[options.option] & (count > 0))
    fits = (needs[run] <= room * (1 - TOLERANCE)).all(axis=1)
    usable[options.option[run[~fits]]] = False
    run = run[usable[options.option[run]]]
    chosen = np.flatnonzero(usable)
    has_option = np.bincount(options.table[chosen], minlength=len(options.tables)) > 0
    if room[0] <= 0 or not len(run) or not has_option.all():
        return None
    gang = options.gang[run] != NO_GANG
    distinct, kind = np.unique(np.column_stack([needs[run], gang]), axis=0, return_inverse=True)
    if len(distinct) > most_kinds:
        return None
    matrix = np.zeros((len(distinct), len(chosen)))
    kind_of = np.full(options.num_shards, -1)
    kind_of[run] = kind.reshape(-1)
    np.add.at(matrix, (kind.reshape(-1), np.searchsorted(chosen, options.option[run])), count[run])
    least = np.maximum(limit, 1e-30)
    return Kinds(
        options=chosen,
        table=options.table[chosen],
        needs=matrix,
        size=distinct[:, :-1] / np.maximum(room, 1e-30),
        kind_of=kind_of,
        is_gang=distinct[:, -1] > 0,
        spread=spread[chosen] / least,
        budget=budget / least,
        labels=tuple(row.tobytes() for row in distinct),
    )


def _needs(space: SearchSpace) -> tuple[Floats, Ints]:
    """What each shard of a run needs, ``[S, D]``, and how many there are, ``[S]``.

    A gang takes as much of each rank as its largest shard, so all its shards are counted with its first run.
    """
    options = space.options
    needs, count = np.column_stack([space.cost_ms, space.memory_bytes]), options.count.copy()
    run = np.flatnonzero(options.gang != NO_GANG)
    if len(run):
        run = run[np.argsort(options.gang[run], kind="stable")]
        starts = np.flatnonzero(np.diff(options.gang[run], prepend=NO_GANG))
        total = np.add.reduceat(count[run], starts)
        count[run] = 0
        count[run[starts]] = total
        needs[run[starts]] = np.maximum.reduceat(needs[run], starts, axis=0)
    return needs, count


def whole_tables(tables: Floats, kinds: Kinds, alike: Ints) -> Ints:
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


def seat(bins: Bins, kinds: Kinds, patterns: Sequence[Pattern], hosts: Sequence[HostPattern] = ()) -> None:
    """Put shards into ranks as patterns say, those with most ranks first; what is left over is left out.

    A pattern with shards of gangs takes a host.

    Args:
        bins: all shards, none in a rank; ``kind`` is the run of each.
        kinds: of the shards.
        patterns: of the program.
        hosts: what hosts hold; these come before the patterns.
    """
    seating = _Seating(bins, kinds)
    for host in hosts:
        seating.seat_hosts(host)
    seating.seat(patterns)


class _Seating:
    def __init__(self, bins: Bins, kinds: Kinds) -> None:
        self._bins, self._kinds = bins, kinds
        kind = kinds.kind_of[bins.kind]
        alone = bins.gang == NO_GANG
        self._alone = [np.flatnonzero(alone & (kind == k)).tolist()[::-1] for k in range(len(kinds.size))]
        self._gangs: list[list[int]] = [[] for _ in range(len(kinds.size))]
        for gang, members in bins.members.items():
            if len(members) <= bins.bins_per_host:
                self._gangs[kind[members[0]]].append(gang)
        self._free = list(range(len(bins.used)))[::-1]

    def seat_hosts(self, host: HostPattern) -> None:
        size = self._bins.bins_per_host
        ranks = self._free[-size * host.hosts :][::-1]
        del self._free[-size * host.hosts :]
        for first in ranks[::size]:
            self._put_gangs(host.gangs, first)
        for pattern in host.patterns:
            for _ in range(round(pattern.ranks)):
                self._put_alone(pattern.shards, ranks.pop())

    def seat(self, patterns: Sequence[Pattern]) -> None:
        size, free = self._bins.bins_per_host, self._free
        left = np.array([pattern.ranks for pattern in patterns])
        has_gang = np.array([(pattern.shards[self._kinds.is_gang]).any() for pattern in patterns], dtype=bool)
        while len(free) >= size and (left[has_gang] >= 0.5 * size).any():
            index = int(np.argmax(np.where(has_gang, left, -1.0)))
            left[index] -= size
            ranks = free[-size:][::-1]
            if self._put_gangs(patterns[index].shards, ranks[0]):
                del free[-size:]
                for rank in ranks:
                    self._put_alone(patterns[index].shards, rank)
        while free and (left > 1e-3).any():
            index = int(np.argmax(left))
            left[index] -= 1
            self._put_alone(patterns[index].shards, free.pop())

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


def patterns_of(kinds: Kinds, known: Mapping[tuple[bytes, ...], Floats]) -> Floats:
    """Patterns of programs before that fit into a rank here: ``[N, K]``.

    Args:
        kinds: of the shards here.
        known: labels of the kinds of a program -> its patterns.
    """
    position = {label: index for index, label in enumerate(kinds.labels)}
    found = [np.empty((0, len(kinds.labels)))]
    for labels, patterns in known.items():
        old = np.array([label in position for label in labels])
        kept = patterns[(patterns[:, ~old] == 0).all(axis=1)]
        mapped = np.zeros((len(kept), len(kinds.labels)))
        mapped[:, [position[label] for label in labels if label in position]] = kept[:, old]
        found.append(mapped[(mapped @ kinds.size <= 1 + TOLERANCE).all(axis=1)])
    return np.concatenate(found)


@frozen(eq=False)
class Trial:
    """What the program of patterns says of a time.

    Args:
        limit_ms: the time.
        kinds: of the shards of the options that are as fast.
        solution: of the program.
    """

    limit_ms: float
    kinds: Kinds
    solution: Solution


class Patterns:
    """Programs of patterns for several times, each beginning with the patterns of those before it.

    Args:
        catalogue: of the space.
        covers: options whose layout puts one shard on every rank: ``[O]``.
    """

    def __init__(self, catalogue: Catalogue, covers: Bools) -> None:
        self._catalogue, self.space, self._covers = catalogue, catalogue.space, covers
        self._few = FewOptions(self.space, covers)
        self._known: Mapping[tuple[bytes, ...], Floats] = {}
        self._last: Program | None = None

    @cached_property
    def _usable(self) -> Bools:
        """The options that put one shard on every rank, or shards that have no rank: ``[O]``."""
        options = self.space.options
        is_free = np.logical_and.reduceat(options.rank == FREE, options.first_shard[:-1])
        usable: Bools = self._catalogue.is_efficient & (self._covers | is_free)
        return usable

    @cached_property
    def _spread(self) -> Floats:
        """What each option takes of every rank: ``[O, D]``."""
        return spread_of(self.space, self._covers)

    def budget(self, proposal: Ints) -> Floats:
        """The spread load of a choice of options ``[A]``, time and memory: ``[D]``."""
        result: Floats = self._spread[proposal].sum(axis=0)
        return result

    def trial(self, budget: Floats, limit_ms: float, *, part: float) -> Trial | None:
        """How many ranks a time asks for; ``None`` where patterns are no help.

        Args:
            budget: the most spread load: ``[D]``.
            limit_ms: the time.
            part: the part of the ranks that would be enough.
        """
        allowed = self._usable & (self.space.largest_cost_ms <= limit_ms)
        everything = self._kinds(allowed, budget, limit_ms)
        if everything is None:
            return None
        enough, grown = part * len(self.space.capacity_bytes), 0
        while True:
            kinds = self._kinds(self._few.of(allowed), budget, limit_ms) or everything
            program = Program(
                kinds, self.space.options.multiplicity, patterns_of(kinds, self._known), self._last
            )
            solution = program.solve(enough, self._is_over)
            self._known, self._last = {kinds.labels: program.best_patterns(_MOST_KEPT)}, program
            new = self._few.add_missing(program, kinds, everything) if solution.ranks > enough else None
            grown += 1
            if new is None or grown > _MOST_GROWTHS or self._is_over():
                return Trial(limit_ms, kinds, solution)
            self._known = {**self._known, everything.labels: new}

    def _is_over(self) -> bool:
        return self.space.watch.is_over

    def _kinds(self, allowed: Bools, budget: Floats, limit_ms: float) -> Kinds | None:
        return kinds_of(self.space, allowed, self._spread, budget, limit_ms)

    def seated(self, trial: Trial) -> Assignment:
        """All tables over all ranks as a program says, most of them within its time."""
        alike = self.space.options.alike
        proposal = whole_tables(trial.solution.tables, trial.kinds, alike)
        result = Assignment(self._catalogue, proposal, trial.limit_ms)
        seat(result.bins, trial.kinds, trial.solution.patterns)
        result.fill()
        return result


def packed(patterns: Patterns, base: Ints, limit_ms: float, *, part: float = 1.0) -> Assignment | None:
    """All tables over all ranks by patterns, most of them within a time; ``None`` where these are no help.

    Args:
        patterns: of the space.
        base: an option for each of all tables, whose spread load is the most: ``[A]``.
        limit_ms: the time.
        part: the part of the ranks that would be enough.
    """
    trial = patterns.trial(patterns.budget(base), limit_ms, part=part)
    if trial is None or trial.solution.ranks > len(patterns.space.capacity_bytes):
        return None
    return patterns.seated(trial)
