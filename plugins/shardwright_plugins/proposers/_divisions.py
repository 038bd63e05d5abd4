"""What part of a rank is left to what lies on every rank: that decides which shards find room beside it.

For a division of each rank's time and memory between the two, the program of patterns says how many ranks all tables
need at least. A little more for one leaves too little for a shard of the other, so divisions are tried where a shard of
some size just finds room; first all of the scarcest memory with a few of the time, then around those that need the
fewest ranks. A table that is like no other and takes much of every rank takes one option: the program would mix
several, so it is asked about each choice for such tables.

Legend: O options, T distinct tables, D dimensions (time, memory tiers), K kinds of shards, N patterns.
"""

from __future__ import annotations

from itertools import islice, product

import attrs
import numpy as np
from attrs import frozen

from shardwright.planning.options import FREE, Bools, Floats
from shardwright_plugins.packing.assignment import Catalogue
from shardwright_plugins.proposers._pattern_program import Kinds, Program
from shardwright_plugins.proposers._patterns import kinds_of, patterns_of, spread_of

# The parts of a rank's time, and of its scarcest memory, that are left to what lies on every rank beyond what has to;
# those of the time that are tried first; and the part of other memory.
_PARTS, _FIRST_PARTS, _OTHER_PART = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.55), (0.002, 0.1), 0.3
# A shard that takes so much of a rank is given just enough room; such divisions at most, and what is left free then.
_LARGE, _MOST_SIZES, _MARGIN = 0.1, 16, 1e-6
# Patterns of other divisions that are added at most, and what they are worth, in ranks, at least.
_MOST_PATTERNS, _WORTH = 2000, 0.85
# How far from the best division others are tried at last.
_STEPS = (0.02, 0.01, 0.005)
# The best divisions; those around which others are tried, and choices for large tables that are looked into.
_MOST_BEST, _MOST_REFINED, _MOST_CHOICES = 3, 2, 2
# So many tables are large, of those whose options differ by so much of a rank; so many choices for them at most.
_MOST_LARGE, _LARGE_SPREAD, _MOST_LOOKED_AT = 2, 0.05, 40


@frozen(eq=False)
class Division:
    """What the program of patterns says of a division.

    Args:
        parts: of the time and of the scarcest memory that are left to what lies on every rank.
        ranks: how many all tables need.
        kinds: of the shards that find room.
        patterns: that were made: ``[N, K]``.
        prices: what a shard of each kind is worth, in ranks: ``[K]``.
    """

    parts: tuple[float, float]
    ranks: float
    kinds: Kinds
    patterns: Floats
    prices: Floats


class Divisions:
    """The divisions tried for one time.

    Args:
        catalogue: of the space.
        limit_ms: the time that no rank should exceed.
    """

    def __init__(self, catalogue: Catalogue, limit_ms: float) -> None:
        space = self._space = catalogue.space
        options, covers = space.options, space.bound.problem.covers
        self._limit_ms = limit_ms
        self._is_free: Bools = np.logical_and.reduceat(options.rank == FREE, options.first_shard[:-1])
        allowed = catalogue.is_efficient & (space.largest_cost_ms <= limit_ms)
        self._allowed: Bools = allowed & (covers | self._is_free)
        self._spread: Floats = spread_of(space, covers)
        capacity = space.capacity_bytes.min(axis=0)
        self._size: Floats = np.append(limit_ms, capacity)
        self._scarce = 1 + int(np.argmax(space.total_bytes.sum(axis=0) / np.maximum(capacity, 1)))

    def fewest(self) -> list[Division]:
        """The divisions that need the fewest ranks, the best first."""
        found = list[Division]()
        for allowed in self._choices():
            found += _Search(self, allowed).fewest()
        return _best(found)

    def _choices(self) -> list[Bools]:
        """The options allowed, ``[O]``: of each large table one, by the choices that need the fewest ranks."""
        large = [self._space.options.of_table(table) for table in self._large()]
        if not large:
            return [self._allowed]
        fast = [[option for option in mine if self._allowed[option]] for mine in large]
        ranked = list[tuple[float, int, Bools]]()
        for chosen in islice(product(*fast), _MOST_LOOKED_AT):
            allowed = self._allowed.copy()
            for mine in large:
                allowed[mine.start : mine.stop] = False
            allowed[list(chosen)] = True
            ranked.append((_Search(self, allowed).glance(), len(ranked), allowed))
        return [allowed for ranks, _, allowed in sorted(ranked)[:_MOST_CHOICES] if np.isfinite(ranks)]

    def _large(self) -> list[int]:
        """Tables that are like no other and whose options differ most in what they take of every rank."""
        options = self._space.options
        part = np.where(self._allowed[:, None], self._spread / np.maximum(self._size, 1e-30), 0.0).max(axis=1)
        most = np.where(options.multiplicity == 1, np.maximum.reduceat(part, options.first_option[:-1]), 0.0)
        found = np.argsort(-most, kind="stable")[:_MOST_LARGE]
        return found[most[found] > _LARGE_SPREAD].tolist()


class _Search:
    """The divisions tried with some options.

    Args:
        of: the space and the time.
        allowed: ``[O]``.
    """

    def __init__(self, of: Divisions, allowed: Bools) -> None:
        self._of, self._allowed, options = of, allowed, of._space.options
        spread = np.where(allowed[:, None], of._spread, np.inf)
        least = np.minimum.reduceat(spread, options.first_option[:-1], axis=0)
        # The part of each dimension that lies on every rank at least.
        self._least: Floats = options.multiplicity @ least / np.maximum(of._size, 1e-30)
        self._tried: dict[tuple[float, float], Division | None] = {}

    def glance(self) -> float:
        """How many ranks are needed about."""
        if (self._least < 1).all():
            for memory, time in product(_PARTS[:3], _FIRST_PARTS):
                self._try(self._least[0] + time, self._least[self._of._scarce] + memory)
        return min((division.ranks for division in self._best()), default=np.inf)

    def fewest(self) -> list[Division]:
        """The divisions that need the fewest ranks, the best first."""
        if not (self._least < 1).all():
            return []
        times, memories = self._rooms(0), self._rooms(self._of._scarce)
        for memory, part in product(memories, _FIRST_PARTS):
            self._try(self._least[0] + part, memory)
        for division in self._best()[:_MOST_REFINED]:
            for time in times:
                self._try(time, division.parts[1])
        for division in self._best()[:1]:
            for memory in memories:
                self._try(division.parts[0], memory)
        for step, division in ((step, division) for step in _STEPS for division in self._best()[:1]):
            for way in product((-step, 0.0, step), repeat=2):
                parts = np.array(division.parts) + way
                if (parts >= self._least[[0, self._of._scarce]]).all():
                    self._try(*parts.tolist())
        watch = self._of._space.watch
        return [division if watch.is_over else self._enriched(division) for division in self._best()]

    def _enriched(self, division: Division) -> Division:
        """A division with the patterns of all others that fit there and are worth about a rank.

        Whole numbers need more patterns than fractions do.
        """
        others = [other for other in self._tried.values() if other is not None]
        watch = self._of._space.watch
        found = np.concatenate(
            [
                patterns_of(division.kinds, {each.kinds.labels: each.patterns})
                for each in others
                if not watch.is_over
            ]
            or [division.patterns]
        )
        found = np.unique(np.concatenate([division.patterns, found]), axis=0)
        worth = found @ division.prices
        best = np.argsort(-worth, kind="stable")[:_MOST_PATTERNS]
        return attrs.evolve(
            division, patterns=np.concatenate([division.patterns, found[best[worth[best] > _WORTH]]])
        )

    def _best(self) -> list[Division]:
        return _best([division for division in self._tried.values() if division is not None])

    def _rooms(self, dimension: int) -> list[float]:
        """Parts that leave the rest of a dimension to other shards; some leave just enough for a large one."""
        space, least = self._of._space, self._least[dimension]
        largest = np.column_stack([space.largest_cost_ms, space.largest_bytes])[:, dimension]
        sizes = np.unique(largest[self._allowed & self._of._is_free]) / max(self._of._size[dimension], 1e-30)
        sizes = sizes[(sizes > _LARGE) & (sizes < 1 - least)]
        if len(sizes):
            sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, _MOST_SIZES).astype(np.int64))]
        parts = np.concatenate([least + np.array(_PARTS), 1 - sizes * (1 + _MARGIN)])
        found: list[float] = np.unique(parts[parts < 1]).tolist()
        return found

    def _try(self, time: float, memory: float) -> None:
        """Ask the program of patterns about a division."""
        if (time, memory) not in self._tried and not self._of._space.watch.is_over:
            self._tried[time, memory] = self._division(time, memory)

    def _division(self, time: float, memory: float) -> Division | None:
        """What the program says; ``None`` if what has to lie on every rank takes more, or patterns are no help."""
        space, size = self._of._space, self._of._size
        parts = np.full(len(size), _OTHER_PART)
        parts[[0, self._of._scarce]] = time, memory
        kinds = kinds_of(space, self._allowed, self._of._spread, parts * size, self._of._limit_ms)
        if kinds is None or (kinds.least_spread(space.options.multiplicity) > kinds.budget + _MARGIN).any():
            return None
        program = Program(kinds, space.options.multiplicity)
        solution = program.solve(0.0, lambda: space.watch.is_over)
        return Division((time, memory), solution.ranks, kinds, program.patterns, program.prices)


def _best(found: list[Division]) -> list[Division]:
    return sorted(found, key=lambda division: (division.ranks, division.parts))[:_MOST_BEST]
