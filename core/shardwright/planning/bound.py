"""How good a plan can be at best: a lower bound of the largest rank's time, by duality.

The choice of one option per table is relaxed twice: shards are put on ranks in any parts, and all ranks' memory is one.
For a time ``z``, a plan that is faster than ``z`` uses only options of which every shard takes less than ``z``, and
all its shards together take less than ``W z``. So if for some multipliers ``lambda >= 0`` of the memory tiers

    sum over tables of min over these options of (total cost + lambda . total bytes)  -  lambda . capacity  >=  W z

then no plan is faster than ``z``: with any such plan the left side is at most its total cost, as it fits. This is
Lagrangian relaxation of the multiple-choice knapsack problem (Sinha and Zoltners 1979; Kellerer, Pferschy and Pisinger,
Knapsack Problems, 2004, chapter 11). ``z`` and the multipliers are the certificate; :meth:`Relaxation.proves` is all it
takes to check it.

Legend: T distinct tables, O options, M memory tiers, W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from attrs import frozen

from shardwright.planning.distinct import distinct
from shardwright.planning.dual import TOLERANCE, Choice, Dual
from shardwright.planning.options import FREE, Bools, Floats, Ints
from shardwright.planning.space import SearchSpace

NOTHING_MS = 1e-12
"""A time as good as none: where shards cost nothing, a bisection would go on down to the least of all numbers."""


@frozen
class Certificate:
    """That no plan's largest rank takes less than ``z_ms``.

    Args:
        z_ms: the bound.
        proof: JSON data, a node of a proof by cases (see :mod:`shardwright.planning.cases`); a leaf has the
            ``multipliers`` by tier, milliseconds per byte.
    """

    z_ms: float = 0.0
    proof: Mapping[str, Any] = {}

    def to_data(self) -> dict[str, Any]:
        """As JSON data."""
        return {"z_ms": self.z_ms, **self.proof}


@frozen(eq=False)
class Case:
    """Some of all plans.

    The *spread load* of a plan is what the options whose layouts use every rank once take of each rank at least.

    Args:
        allowed: the options that they use: ``[O]``.
        low_ms: their spread load is no less.
        high_ms: their spread load is no more.
        low_bytes: of every rank's memory of each tier, no less is taken by such options: ``[M]``; none by default.
        high_bytes: no more: ``[M]``; no end by default.
    """

    allowed: Bools
    low_ms: float = 0.0
    high_ms: float = np.inf
    low_bytes: Floats | None = None
    high_bytes: Floats | None = None


TIME = "time"


@frozen
class Rounding:
    """A dual feasible function: sizes rounded so that what fits into a rank still fits, but lumps weigh more.

    A shard that takes a part ``x`` of a rank counts ``floor((k + 1) x) / k``: of shards that fit into a rank together,
    these sum to 1 at most (Fekete and Schepers 2001, the function ``u^(k)`` without its exception for whole
    numbers). So with ``k = 1`` at most one shard that takes more than half of a rank goes to each.

    Args:
        of: ``"time"``, or the name of a memory tier.
        parts: ``k``.
    """

    of: str
    parts: int


@frozen(eq=False)
class Room:
    """What plans of a case may use.

    Args:
        allowed: options: ``[O]``.
        size: what a rank has for shards that have none by their layout: time, then bytes of each tier: ``[1 + M]``.
    """

    allowed: Bools
    size: Floats


class Relaxation:
    """The relaxed choice problem of a space, with as many options as matter."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        options = space.options
        self.capacity: Ints = space.capacity_bytes.sum(axis=0)
        self.world_size = len(space.capacity_bytes)
        self.cost = space.total_cost_ms
        self.largest = space.largest_cost_ms
        self.share: Floats = space.total_bytes / np.maximum(self.capacity, 1)
        self.first = options.first_option[:-1]
        self.count: Floats = options.multiplicity.astype(np.float64)
        self.fits: Bools = (space.largest_bytes <= space.capacity_bytes.max(axis=0)).all(axis=1)
        self._table = options.table
        self._distinct = np.arange(len(self.count))
        self._room: tuple[Case, float, Room] | None = None

    @cached_property
    def least_ms(self) -> float:
        """No plan is faster than the table whose best option is worst: its largest shard."""
        largest = np.where(self.fits, self.largest, np.inf)
        return max(float(np.minimum.reduceat(largest, self.first).max()), self.space.least_ms)

    @cached_property
    def thresholds_ms(self) -> Floats:
        """The times at which an option comes in, in rising order."""
        return distinct(self.largest[self.fits])

    def choose(self, cost: Floats, share: Floats, multipliers: Floats) -> Choice:
        """The cheapest option of each table at some multipliers.

        Args:
            cost: of each option, infinite for those that are not allowed; each table has one that is: ``[O]``.
            share: the part of each resource that an option takes: ``[O, M]``.
            multipliers: of the resources: ``[M]``.
        """
        priced = cost + share @ multipliers
        least = np.minimum.reduceat(priced, self.first)
        at = (priced == least[self._table]).nonzero()[0]
        option = at[self._table[at].searchsorted(self._distinct)]
        used: Floats = self.count @ share[option]
        value = float(self.count @ least - multipliers.sum())
        return Choice(option, float(self.count @ cost[option]), used, multipliers, value)

    def maximise(
        self,
        z_ms: float,
        start: Floats | None = None,
        *,
        margin: float = 0.0,
        case: Case | None = None,
        roundings: Sequence[Rounding] = (),
    ) -> Dual:
        """The best multipliers for a time, as far as needed to tell whether they prove it.

        Args:
            z_ms: the time.
            start: multipliers to start from: ``[M]``.
            margin: the part of memory to leave free; with one, nothing is proven.
            case: the plans it is about; all by default.
            roundings: further resources.
        """
        allowed, share = self.allowed(z_ms), self.share / (1 - margin)
        if case is not None:
            room = self.within(case, z_ms)
            allowed = room.allowed
            if np.isfinite(case.high_ms):
                share = np.column_stack([share, self.spread / max(case.high_ms, 1e-30)])
            for rounding in roundings:
                share = np.column_stack([share, self.rounded(rounding, room)])
        return Dual(self, z_ms, allowed, share, start)

    def within(self, case: Case, z_ms: float) -> Room:
        """The options that plans of a case faster than ``z_ms`` may use, and the room beside the spread load.

        The spread load is at least what the allowed options of each table need, of time and of each tier. A shard that
        its layout gives no rank must find room beside it.
        """
        if self._room is None or self._room[0] is not case or self._room[1] != z_ms:
            self._room = (case, z_ms, self._room_within(case, z_ms))
        return self._room[2]

    def _room_within(self, case: Case, z_ms: float) -> Room:
        allowed = self.allowed(z_ms) & case.allowed
        least = np.minimum.reduceat(np.where(allowed[:, None], self._spreads, np.inf), self.first, axis=0)
        low = self.count @ np.where(np.isfinite(least), least, 0.0)
        if case.low_bytes is not None:
            low[1:] = np.maximum(low[1:], case.low_bytes)
        low[0] = max(case.low_ms, float(low[0]))
        room = np.append(z_ms, self._most_bytes) - low
        limit = room.copy()
        limit[0] *= 1 - TOLERANCE
        fits = (self._is_settled | (self._movables <= limit)).all(axis=1)
        return Room(allowed & fits, room)

    def rounded(self, rounding: Rounding, room: Room) -> Floats:
        """The part of all ranks that each option takes in a rounding's measure: ``[O]``.

        Args:
            rounding: what is rounded, and to what.
            room: what a rank has for shards that have none by their layout.
        """
        measure = self._measure(rounding, room)
        return np.add.reduceat(measure, self.space.options.first_shard[:-1]) / self.world_size

    def rounded_uses(self, parts: Ints, room: Room, option: Ints) -> Floats:
        """The part of all ranks that a choice of options ``[T]`` takes, rounded in every way: ``[1 + M, K]``.

        Args:
            parts: of the roundings: ``[K]``.
            room: what a rank has for shards that have none by their layout.
            option: the choice.
        """
        options = self.space.options
        starts, stops = options.first_shard[option], options.first_shard[option + 1]
        num_runs = stops - starts
        runs = (starts - num_runs.cumsum() + num_runs).repeat(num_runs)
        runs += np.arange(len(runs))
        weight = self._free_shards[runs] * self.count.repeat(num_runs)
        part = (self._needs[runs] / np.maximum(room.size, 1e-30)).T * (1 - TOLERANCE)
        whole = np.floor(part[:, None, :] * (parts[:, None] + 1)) / parts[:, None]
        result: Floats = whole @ weight / self.world_size
        return result

    def _measure(self, rounding: Rounding, room: Room) -> Floats:
        """What all shards of each run count together."""
        options = self.space.options
        if rounding.of == TIME:
            part = self.space.cost_ms / max(room.size[0], 1e-30)
        else:
            tier = self.space.tiers.index(rounding.of)
            part = self.space.memory_bytes[:, tier] / max(room.size[1 + tier], 1e-30)
        # Not quite a whole number is taken for the whole number below: that proves less, and is safe.
        whole = np.floor(part * (rounding.parts + 1) * (1 - TOLERANCE))
        result: Floats = np.where(options.rank == FREE, whole / rounding.parts, 0.0) * options.count
        return result

    @cached_property
    def covers(self) -> Bools:
        """Whether an option's layout puts one shard on every rank, and no others: ``[O]``."""
        options, first = self.space.options, self.space.options.first_shard
        before = np.cumsum(options.count) - options.count
        before = before - np.repeat(before[first[:-1]], np.diff(first))
        covers = np.logical_and.reduceat(options.rank == before, first[:-1])
        result: Bools = covers & (options.shards_per_option == self.world_size)
        return result

    @cached_property
    def spread(self) -> Floats:
        """What each option takes of every rank's time, at least: ``[O]``; 0 where it does not put one shard on each."""
        least = np.minimum.reduceat(self.space.cost_ms, self.space.options.first_shard[:-1])
        return np.where(self.covers, least, 0.0)

    @cached_property
    def spread_bytes(self) -> Floats:
        """What each option takes of every rank's memory, at least: ``[O, M]``, likewise."""
        least = np.minimum.reduceat(self.space.memory_bytes, self.space.options.first_shard[:-1], axis=0)
        return np.where(self.covers[:, None], least, 0.0)

    @cached_property
    def movable(self) -> Floats:
        """The time of the largest of each option's shards that have no rank by their layout, or 0: ``[O]``."""
        free = np.where(self.space.options.rank == FREE, self.space.cost_ms, 0.0)
        return np.maximum.reduceat(free, self.space.options.first_shard[:-1])

    @cached_property
    def movable_bytes(self) -> Floats:
        """The memory of these: ``[O, M]``."""
        free = np.where((self.space.options.rank == FREE)[:, None], self.space.memory_bytes, 0.0)
        return np.maximum.reduceat(free, self.space.options.first_shard[:-1], axis=0)

    @cached_property
    def _needs(self) -> Floats:
        """Time and memory of each shard of a run: ``[S, 1 + M]``."""
        return np.column_stack([self.space.cost_ms, self.space.memory_bytes])

    @cached_property
    def _free_shards(self) -> Ints:
        """How many shards of each run have no rank by their layout: ``[S]``."""
        return np.where(self.space.options.rank == FREE, self.space.options.count, 0)

    @cached_property
    def _spreads(self) -> Floats:
        """``spread`` and ``spread_bytes``: ``[O, 1 + M]``."""
        return np.column_stack([self.spread, self.spread_bytes])

    @cached_property
    def _movables(self) -> Floats:
        """``movable`` and ``movable_bytes``: ``[O, 1 + M]``."""
        return np.column_stack([self.movable, self.movable_bytes])

    @cached_property
    def _is_settled(self) -> Bools:
        """Where there is no such shard: ``[O, 1 + M]``."""
        is_settled: Bools = self._movables == 0
        return is_settled

    @cached_property
    def _most_bytes(self) -> Ints:
        """What the largest rank has of each tier: ``[M]``."""
        most: Ints = self.space.capacity_bytes.max(axis=0)
        return most

    def allowed(self, z_ms: float) -> Bools:
        """The options of which every shard takes less than ``z_ms`` and fits on some rank: ``[O]``."""
        return self.fits & (self.largest < z_ms * (1 - TOLERANCE))

    def certificate(self, z_ms: float, multipliers: Floats) -> Certificate:
        """The certificate in milliseconds per byte."""
        per_byte = multipliers / np.maximum(self.capacity, 1)
        return Certificate(z_ms, {"multipliers": dict(zip(self.space.tiers, per_byte.tolist(), strict=True))})


@frozen(eq=False)
class Bound:
    """The best bound there is by this relaxation, but for its precision.

    Args:
        problem: the relaxed problem.
        certificate: the proof.
        possible_ms: a time a little above, which the relaxation cannot refute; infinite if no choice fits in memory.
        multipliers: the multipliers of the proof: ``[M]``, ms for all ranks' memory.
    """

    problem: Relaxation
    certificate: Certificate
    possible_ms: float
    multipliers: Floats

    @classmethod
    def of(cls, space: SearchSpace, *, precision: float = 1e-4) -> Bound:
        """The bound of a space, by bisection.

        Args:
            space: options and costs.
            precision: relative.
        """
        problem = Relaxation(space)
        low, proof = problem.least_ms, np.zeros(problem.share.shape[1])
        if not np.isfinite(low):
            return cls(problem, Certificate(), np.inf, proof)
        dual = problem.maximise(np.inf)
        if dual.best is not None and dual.value_ms / problem.world_size > low:
            low, proof = dual.value_ms / problem.world_size, dual.best.multipliers
        high = _relaxed_value(problem, low)
        while high > max(low * (1 + precision), NOTHING_MS) and np.isfinite(high):
            middle = (low * high) ** 0.5 if low > 0 else high / 2
            trial = problem.maximise(middle, proof)
            if trial.is_empty or trial.value_ms >= problem.world_size * middle * (1 + TOLERANCE):
                low = _reached(problem, trial, middle)
                proof = proof if trial.best is None else trial.best.multipliers
            else:
                high = middle
        return cls(problem, problem.certificate(low, proof), high, proof)


def _reached(problem: Relaxation, trial: Dual, z_ms: float) -> float:
    """The time up to which the options of ``z_ms`` are all there are, as far as their value proves it."""
    later = problem.thresholds_ms[problem.thresholds_ms >= z_ms * (1 - TOLERANCE)]
    next_ms = float(later[0]) if len(later) else np.inf
    return max(z_ms, min(next_ms, trial.value_ms / problem.world_size))


def _relaxed_value(problem: Relaxation, low: float) -> float:
    """A time that the relaxation cannot refute; infinite if no choice fits in memory."""
    high = max(low, float(problem.thresholds_ms[0]) if len(problem.thresholds_ms) else 0.0, NOTHING_MS)
    for _ in range(200):
        trial = problem.maximise(high * (1 + 1e-6))
        if not trial.is_empty and trial.value_ms < problem.world_size * high:
            return high
        high *= 1.5
    return np.inf
