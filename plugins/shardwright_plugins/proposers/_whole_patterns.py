"""Patterns in whole numbers: which options, and how many ranks and hosts hold each pattern, by a solver.

This is price and branch without the branches: of the patterns that the program of fractions has made, whole numbers are
taken of (Desrosiers and Luebbecke, A Primer in Column Generation, 2005).

Legend: A tables, K kinds of shards, O' options, T distinct tables, N patterns, W ranks of hosts of L.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from shardwright.planning.options import Floats, Ints
from shardwright.planning.solver import MixedProgram
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.sharing import share_out
from shardwright_plugins.proposers._full_patterns import FullPatterns
from shardwright_plugins.proposers._pattern_program import Kinds, Pattern
from shardwright_plugins.proposers._patterns import seat, whole_tables

# The solver's nodes, the seconds that only far slower machines need, and how exact it is.
_NODES, _SECONDS, _PRECISION = 400, 300.0, 1e-4
# For what the patterns leave over: moves and swaps, options changed, and groups of ranks shared out anew.
_STEPS, _CHANGES, _PAIRS, _SHARINGS = 200, 10, 4, 1000


@frozen(eq=False)
class Whole:
    """A choice in whole numbers.

    Args:
        tables: how many tables take each option: ``[O']``.
        patterns: with how many ranks hold each.
    """

    tables: Ints
    patterns: tuple[Pattern, ...]


def whole_numbers(
    space: SearchSpace, kinds: Kinds, patterns: Floats, filled: FullPatterns | None = None
) -> Whole | None:
    """Options and patterns that hold all tables on all ranks; ``None`` if the solver finds none.

    Args:
        space: the ranks, and how many tables are alike.
        kinds: of the shards.
        patterns: ``[N, K]``.
        filled: where these are all patterns that fill a rank: what is poured in.
    """
    # A pattern with shards of gangs is that of all ranks of a host.
    ranks = np.where(patterns[:, kinds.is_gang].any(axis=1), space.topology.local_world_size, 1)
    model = _model(space, kinds, patterns, ranks, filled)
    found = model.solve(most_nodes=_NODES, seconds=_SECONDS, precision=_PRECISION)
    if found.x is None:
        return None
    numbers, num_options = np.rint(found.x).astype(np.int64), len(kinds.options)
    held = zip(patterns, (numbers[num_options:] * ranks).tolist(), strict=True)
    used = (Pattern(shards.astype(np.int64), float(number)) for shards, number in held if number)
    return Whole(numbers[:num_options], tuple(used))


def _model(
    space: SearchSpace, kinds: Kinds, patterns: Floats, ranks: Ints, filled: FullPatterns | None
) -> MixedProgram:
    """Columns: tables that take each option, then places of each pattern.

    Rows: kinds; what is poured in; tables; what lies on every rank, by dimension; ranks.
    """
    from scipy.sparse import bmat, csr_matrix

    multiplicity, world_size = space.options.multiplicity, len(space.capacity_bytes)
    num_options, dims = len(kinds.options), len(kinds.budget)
    is_of = np.zeros((len(multiplicity), num_options))
    is_of[kinds.table, np.arange(num_options)] = 1
    told = np.ones(len(kinds.size), dtype=bool) if filled is None else ~filled.is_small
    poured = (
        np.zeros(num_options) if filled is None else kinds.size[~told, filled.scarce] @ kinds.needs[~told]
    )
    free = np.zeros(len(patterns)) if filled is None else filled.free
    blocks = [
        [csr_matrix(-kinds.needs[told]), csr_matrix((patterns * ranks[:, None]).T[told])],
        [csr_matrix(-poured[None]), csr_matrix(free[None])],
        [csr_matrix(is_of), None],
        [csr_matrix(kinds.spread.T), None],
        [None, csr_matrix(ranks[None].astype(np.float64))],
    ]
    least = int(told.sum()) + 1
    most = np.append(multiplicity[kinds.table], np.full(len(patterns), world_size) // ranks)
    return MixedProgram(
        cost=np.append(np.zeros(num_options), ranks.astype(np.float64)),
        matrix=bmat(blocks, format="csr"),
        lower=np.concatenate([np.zeros(least), multiplicity, np.full(dims + 1, -np.inf)]),
        upper=np.concatenate([np.full(least, np.inf), multiplicity, kinds.budget, [world_size]]),
        most=most.astype(np.float64),
        is_whole=np.ones(len(most), dtype=bool),
    )


def seated(catalogue: Catalogue, kinds: Kinds, whole: Whole, limit_ms: float) -> Assignment:
    """The plan that patterns make; what is left over is put where there is room.

    Args:
        catalogue: of the space.
        kinds: of the shards.
        whole: options and patterns.
        limit_ms: the time that no rank should exceed.
    """
    alike = catalogue.space.options.alike
    result = Assignment(catalogue, whole_tables(whole.tables.astype(np.float64), kinds, alike), limit_ms)
    seat(result.bins, kinds, whole.patterns)
    result.fill()
    if not result.repair(_STEPS, changes=_CHANGES, pairs=_PAIRS):
        share_out(result.bins, _SHARINGS)
    return result
