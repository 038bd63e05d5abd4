"""Plans within a time by patterns in whole numbers, where a gap is wide.

For several parts of each rank's time and memory that are left to what lies on every rank, the program of patterns says
how many ranks all tables need at least; where these are enough, a solver looks for whole numbers.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from shardwright.planning.options import FREE, Floats
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.proposers._pattern_program import Program
from shardwright_plugins.proposers._patterns import kinds_of, spread_of
from shardwright_plugins.proposers._whole_patterns import seated, whole_numbers

# The parts of a rank's time, and of its scarcest memory, that are left to what lies on every rank.
_TIME_PARTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.55)
_MEMORY_PARTS = (0.0, 0.1, 0.3)
_OTHER_PART = 0.3
# Divisions that need the fewest ranks, for which whole numbers are looked for.
_MOST_SOLVED, _WORTH_A_TRY = 3, 1.0


def packed_within(catalogue: Catalogue, limit_ms: float) -> Assignment | None:
    """A plan that takes about as long as it may, or less; ``None`` if patterns do not find one.

    Args:
        catalogue: of the space.
        limit_ms: the time that no rank should exceed.
    """
    space, best = catalogue.space, None
    options, covers = space.options, space.bound.problem.covers
    is_free = np.logical_and.reduceat(options.rank == FREE, options.first_shard[:-1])
    allowed = catalogue.is_efficient & (space.largest_cost_ms <= limit_ms) & (covers | is_free)
    spread, ways = spread_of(space, covers), []
    for budget in _budgets(catalogue, limit_ms):
        kinds = kinds_of(space, allowed, spread, budget, limit_ms)
        if kinds is not None:
            program = Program(kinds, options.multiplicity)
            ranks = program.solve(0.0).ranks
            if ranks <= _WORTH_A_TRY * len(space.capacity_bytes):
                ways.append((ranks, kinds, program.patterns))
    for _, kinds, patterns in sorted(ways, key=lambda way: way[0])[:_MOST_SOLVED]:
        whole = whole_numbers(space, kinds, patterns)
        if whole is None:
            continue
        found = seated(catalogue, kinds, whole, limit_ms)
        if np.isfinite(found.value_ms) and (best is None or found.value_ms < best.value_ms):
            best = found
    return best


def _budgets(catalogue: Catalogue, limit_ms: float) -> list[Floats]:
    """What may lie on every rank: ``[D]`` each."""
    capacity = catalogue.space.capacity_bytes.min(axis=0)
    scarce = int(np.argmax(catalogue.space.total_bytes.sum(axis=0) / np.maximum(capacity, 1)))
    budgets = []
    for time, memory in product(_TIME_PARTS, _MEMORY_PARTS):
        parts = np.full(len(capacity), _OTHER_PART)
        parts[scarce] = memory
        budgets.append(np.append(time * limit_ms, parts * capacity))
    return budgets
