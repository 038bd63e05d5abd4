"""A few ranks at a time: a solver shares out what lies on them anew, options and places together.

Large neighbourhood search (Shaw 1998) over the program of the problem itself: what lies on a few ranks is free, all
else stays. So a table may be cut otherwise and others move at once, which no move or swap does; and little room on many
ranks comes together on one. Of memory alone it makes plans that fit; within a time, faster ones: on the way memory
may be exceeded, too.
Legend: N columns of the program, K rows, W ranks, D dimensions (time, then memory tiers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from shardwright.planning.options import FREE, Bools, Floats, Ints
from shardwright.planning.program import Part, Program
from shardwright.planning.solver import MixedProgram
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue

# Programs of more columns take too long to write down; where times count, many more are left than where they do not.
_MOST_COLUMNS, _MOST_TIMED_COLUMNS = 60_000, 30_000
# Ranks of a group at least and at most: one more after so many rounds in which the solver found nothing better,
# one less after so many that it did not finish.
_SMALLEST_GROUP, _LARGEST_GROUP, _PATIENCE = 4, 16, 3
# Of one round: nodes of the solver's tree, the seconds that only far slower machines need, and how exact it is.
_NODES, _SECONDS, _PRECISION = 100, 200.0, 0.1
# Where times count, what is found is found soon: how exact the solver is besides, in parts of what a group is over
# beforehand, and its nodes. One round in so many is about whole hosts, if there are gangs, which takes long; the others
# are about so many times the ranks of a group; so many without a gain are the last.
_ALLOWANCE, _TIMED_NODES, _HOSTS_EVERY, _MORE_RANKS, _MOST_IDLE = 0.5, 5, 4, 2, 12
# What is over a limit counts 1; what lies on the rank that is to become empty, so little.
_GATHER = 1e-3
# What is over by less is rounding; the solver is exact to a millionth, so it is to leave as much; a gain is more.
_ROUNDING, _MARGIN, _GAIN = 1e-12, 2e-6, 1e-5
_REPAIR_STEPS = 60
# The parts of the way back to a plan's time at which it is tried again from what exceeds less time.
_MORE_TIME = (0.0, 0.6)


def without_time(space: SearchSpace) -> SearchSpace:
    """The same problem where nothing takes time: what is left is memory, and fewer options are worth a look."""
    return attrs.evolve(space, phases={})


class Neighbourhoods:
    """Plans that are nearly within a time and all memories, brought within them.

    Args:
        space: options, costs and memory.
        start: a plan that exceeds what there is by a little.
        limit_ms: the time that no rank should exceed.
        is_timed: whether time counts, so that programs are harder.
    """

    def __init__(
        self, space: SearchSpace, start: Assignment, limit_ms: float, *, is_timed: bool = False
    ) -> None:
        most_columns = _MOST_TIMED_COLUMNS if is_timed else _MOST_COLUMNS
        self._is_timed, self._most_nodes = is_timed, _TIMED_NODES if is_timed else _NODES
        self._space, self._local = space, space.topology.local_world_size
        kept = set(start.proposal.tolist())
        self._program = Program.of(space, limit_ms, most_columns=most_columns, keep=kept)
        if self._program is not None:
            self._numbers = _numbers(self._program, start)
            self._write(self._program)

    def _write(self, program: Program) -> None:
        """The rows, and of each column the rank or host that it counts shards of."""
        from scipy.sparse import csc_matrix

        world_size, base = len(self._space.capacity_bytes), len(program.equals)
        row, column, value = (np.array(each) for each in zip(*program.entries, strict=True))
        rows = base + world_size * (1 + len(self._space.tiers))
        self._matrix: Any = csc_matrix((value, (row, column)), shape=(rows, len(program.most)))
        self._equals: Floats = np.array(program.equals)
        self._most: Floats = np.array(program.most)
        self._most[program.left_out] = 0
        self._first: Ints = np.full(len(self._most), FREE)  # the first rank of what a column counts
        self._last: Ints = np.full(len(self._most), FREE)
        for parts in program.parts.values():
            for part in parts:
                self._locate(part)

    def _locate(self, part: Part) -> None:
        size = 1 if part.local is None else self._local
        places = np.arange(len(self._space.capacity_bytes) // size)
        self._first[part.first + places] = places * size
        self._last[part.first + places] = places * size + size - 1
        for run in part.inside:
            self._locate(run)

    def repaired(self, rounds: int, is_over: Callable[[], bool]) -> tuple[Ints, Ints] | None:
        """The option of each table and the ranks of free shards, nearest to what fits; ``None`` for too many columns.

        Args:
            rounds: groups of ranks shared out at most.
            is_over: whether to end.
        """
        if self._program is None:
            return None
        random, size = np.random.default_rng(0), _SMALLEST_GROUP
        in_vain = unfinished = idle = 0
        over = self._over(self._numbers)
        for _ in range(rounds):
            if over.sum() <= _ROUNDING or is_over() or (self._is_timed and idle >= _MOST_IDLE):
                break
            numbers = self._round(self._group(over, size, random), random)
            after = np.full(1, np.inf) if numbers is None else self._over(numbers)
            gain = float(over.sum() - after.sum())
            in_vain = in_vain + 1 if abs(gain) <= _GAIN else 0
            idle = 0 if gain > _GAIN else idle + 1
            unfinished = unfinished + 1 if gain < -_GAIN else 0
            if numbers is not None and gain >= -_GAIN:
                self._numbers, over = numbers, after
            if in_vain >= _PATIENCE or unfinished >= _PATIENCE:
                size = int(np.clip(size + (1 if in_vain else -1), _SMALLEST_GROUP, _LARGEST_GROUP))
                in_vain = unfinished = 0
        return self._program.plan(self._numbers)

    @property
    def _fullest(self) -> int:
        """The dimension of which most is in use."""
        return int(np.argmax(self._load(self._numbers).sum(axis=1)))

    def _over(self, numbers: Ints) -> Floats:
        """By how much each rank is over what it has, in parts of it: ``[W]``."""
        result: Floats = np.maximum(self._load(numbers) - 1, 0).sum(axis=0)
        return result

    def _load(self, numbers: Ints) -> Floats:
        """What each rank holds, in parts of what it may: ``[D, W]``."""
        load: Floats = (self._matrix @ numbers)[len(self._equals) :]
        return load.reshape(-1, len(self._space.capacity_bytes))

    def _group(self, over: Floats, size: int, random: np.random.Generator) -> Bools:
        """A rank that is over what it has, at times the emptiest, others by chance: ``[W]``.

        Where there are gangs, they are whole hosts, so that gangs move too; where times count, not always.
        """
        if (self._last == self._first).all():
            return self._drawn(over, 1, size, random)
        if not self._is_timed:
            return self._drawn(over, self._local, size, random)
        ranks = self._drawn(over, 1, _MORE_RANKS * size, random)
        if random.integers(_HOSTS_EVERY):
            return ranks
        hosts = self._drawn(over, self._local, self._local * int(random.integers(1, 3)), random)
        return hosts | ranks if hosts.sum() == self._local else hosts

    def _drawn(self, over: Floats, step: int, size: int, random: np.random.Generator) -> Bools:
        """Sets of so many ranks each, in all as many ranks as asked for or a few more: ``[W]``."""
        weight = over.reshape(-1, step).sum(axis=1)
        others = random.permutation(len(weight))
        worst = int(random.choice(len(weight), p=weight / weight.sum()))
        if random.integers(2):
            emptiest = int(np.argmin(self._load(self._numbers).max(axis=0).reshape(-1, step).sum(axis=1)))
            others = np.append(emptiest, others[others != emptiest])
        least = 1 if self._is_timed else 2
        chosen = [worst, *others[others != worst][: max(least, -(-size // step)) - 1].tolist()]
        group = np.zeros((len(weight), step), dtype=bool)
        group[chosen] = True
        return group.reshape(-1)

    def _round(self, group: Bools, random: np.random.Generator) -> Ints | None:
        """All columns' numbers after what lies on some ranks was shared out anew."""
        is_free = (self._first == FREE) | (group[self._first] & group[self._last])
        is_free &= self._most > 0
        free = np.flatnonzero(is_free)
        rest = self._matrix @ np.where(is_free, 0, self._numbers)
        base, rows = len(self._equals), self._matrix.shape[0] - len(self._equals)
        program = self._shared(free, rest, base, rows, group, random)
        seconds = self._space.watch.seconds_at_most(_SECONDS)
        found = program.solve(most_nodes=self._most_nodes, seconds=seconds, precision=_PRECISION)
        if found.x is None:
            return None
        numbers = self._numbers.copy()
        numbers[free] = np.rint(found.x[: len(free)]).astype(np.int64)
        return numbers

    def _shared(
        self, free: Ints, rest: Floats, base: int, rows: int, group: Bools, random: np.random.Generator
    ) -> MixedProgram:
        """Columns: what is free, then by what each rank is over, at a price; one rank is to become empty."""
        from scipy.sparse import block_diag, eye, hstack, vstack

        columns = self._matrix[:, free]
        zero = 0 * eye(base, rows)
        over = vstack([zero, -eye(rows)])
        world_size = len(self._space.capacity_bytes)
        gathered = base + world_size * self._fullest + int(random.choice(np.flatnonzero(group)))
        emptied = np.asarray(columns[[gathered]].todense()).reshape(-1) * _GATHER
        room = 1 - _MARGIN - rest[base:]
        # The last column is 1: the solver is to be exact to a part of what is over now, not of what will be.
        over_now = float(self._over(self._numbers)[group].sum())
        allowance = _ALLOWANCE * over_now if self._is_timed else 0.0
        return MixedProgram(
            cost=np.concatenate([emptied, np.ones(rows), [allowance]]),
            matrix=block_diag([hstack([columns, over]), [[1.0]]], format="csr"),
            lower=np.concatenate([self._equals - rest[:base], np.full(rows, -np.inf), [1.0]]),
            upper=np.concatenate([self._equals - rest[:base], room, [1.0]]),
            most=np.concatenate([self._most[free], np.full(rows, np.inf), [1.0]]),
            is_whole=np.arange(len(free) + rows + 1) < len(free),
        )


def _numbers(program: Program, plan: Assignment) -> Ints:
    """What every column of a program counts in a plan: ``[N]``."""
    numbers = np.zeros(len(program.most), dtype=np.int64)
    local = plan.space.topology.local_world_size
    for option, ranks in zip(plan.proposal.tolist(), plan.ranks_of_tables, strict=True):
        numbers[program.columns[option]] += 1
        for part in program.parts[option]:
            if part.local is None:
                np.add.at(numbers, part.first + ranks[part.order[:, 0]], 1)
                continue
            members = part.order[0] if part.order.size else part.inside[0].order[:, 0]
            numbers[part.first + int(ranks[members[0]]) // local] += 1
            for run in part.inside:
                np.add.at(numbers, run.first + ranks[run.order[:, 0]], 1)
    return numbers


def repaired(
    catalogue: Catalogue, nearest: Assignment, rounds: int, is_over: Callable[[], bool]
) -> Assignment:
    """A plan that exceeds memory by less, or not at all, as far as the solver gets a few ranks at a time.

    Args:
        catalogue: of the space.
        nearest: the plan.
        rounds: groups of ranks shared out at most.
        is_over: whether to end.
    """
    found = Neighbourhoods(without_time(catalogue.space), nearest, 1.0).repaired(rounds, is_over)
    if found is None:
        return nearest
    proposal, ranks = found
    result = Assignment(catalogue, proposal, nearest.limit_ms)
    result.place(ranks)
    return result


def quickened(catalogue: Catalogue, best: Assignment, limit_ms: float, rounds: int) -> Assignment | None:
    """A faster plan, as far as the solver gets a few ranks at a time; ``None`` if it gets nowhere.

    On the way memory may be exceeded as well as the time, and what is over becomes less and less. Where that does not
    end, more time is allowed, from there on.

    Args:
        catalogue: of the space.
        best: the plan.
        limit_ms: the time that is aimed at.
        rounds: groups of ranks shared out at most, for each time.
    """
    space, start = catalogue.space, best
    for part in _MORE_TIME:
        limit = limit_ms + part * (best.value_ms - limit_ms)
        search = Neighbourhoods(space, start, limit, is_timed=True)
        found = search.repaired(rounds, lambda: space.watch.is_over)
        if found is None:
            return None
        result = Assignment(catalogue, found[0], limit)
        result.place(found[1])
        start = result.copy()
        result.repair(_REPAIR_STEPS, changes=0)
        result = min(result, start, key=lambda plan: plan.value_ms)
        if result.value_ms < best.value_ms * (1 - _GAIN):
            return result
    return None
