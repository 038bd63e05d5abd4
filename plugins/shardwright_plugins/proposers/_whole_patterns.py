"""Patterns in whole numbers: which options, and how many ranks and hosts hold each pattern, by a solver.

This is price and branch without the branches: of the patterns that the program of fractions has made, whole numbers are
taken of (Desrosiers and Luebbecke, A Primer in Column Generation, 2005).

A gang takes its part of every rank of a host. So hosts are of as many sorts as there are sets of gangs in patterns; the
ranks of each may hold what any pattern holds beside gangs, as far as there is room.

Legend: A tables, K kinds of shards, O' options, T distinct tables, N patterns, G sorts of hosts, W ranks of hosts of L.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from shardwright.planning.options import Floats, Ints
from shardwright.planning.solver import MixedProgram
from shardwright.planning.space import SearchSpace
from shardwright.planning.watch import Watch
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.sharing import share_out
from shardwright_plugins.proposers._full_patterns import FullPatterns
from shardwright_plugins.proposers._pattern_program import TOLERANCE, HostPattern, Kinds, Pattern
from shardwright_plugins.proposers._patterns import seat, whole_tables

# The solver's nodes, the seconds that only far slower machines need, and how exact it is.
_NODES, _SECONDS, _PRECISION = 400, 300.0, 1e-4
# For what the patterns leave over: moves and swaps, options changed, and groups of ranks shared out anew.
_STEPS, _CHANGES, _PAIRS, _SHARINGS = 200, 10, 4, 1000
# So many patterns are compared with each other, to leave out those that are part of another.
_MOST_COMPARED = 500


@frozen(eq=False)
class Whole:
    """A choice in whole numbers.

    Args:
        tables: how many tables take each option: ``[O']``.
        hosts: those that hold gangs.
        patterns: of the ranks of other hosts.
    """

    tables: Ints
    hosts: tuple[HostPattern, ...]
    patterns: tuple[Pattern, ...]


def whole_numbers(
    space: SearchSpace,
    kinds: Kinds,
    patterns: Floats,
    filled: FullPatterns | None = None,
    *,
    part: float = 1.0,
) -> Whole | None:
    """Options and patterns that hold all tables on all ranks; ``None`` if the solver finds none.

    Args:
        space: the ranks, and how many tables are alike.
        kinds: of the shards.
        patterns: ``[N, K]``.
        filled: where these are all patterns that fill a rank: what is poured in. There are no gangs then.
        part: of the solver's nodes and seconds.
    """
    watch = space.watch
    ways = _Ways.of(kinds, patterns, watch) if filled is None else _Ways.without_gangs(patterns)
    if watch.is_over:
        return None
    found = _model(space, kinds, ways, filled).solve(
        most_nodes=int(part * _NODES),
        seconds=watch.seconds_at_most(part * _SECONDS),
        precision=_PRECISION,
    )
    if found.x is None:
        return None
    numbers, num_options = np.rint(found.x).astype(np.int64), len(kinds.options)
    tables, ranks, hosts = np.split(numbers, [num_options, num_options + len(ways.shards)])
    held = [_used(ways.shards, np.where(ways.sort == sort, ranks, 0)) for sort in range(len(ways.gangs))]
    gangs = zip(ways.gangs.astype(np.int64), hosts.tolist(), held, strict=True)
    return Whole(tables, tuple(HostPattern(*each) for each in list(gangs)[1:] if each[1]), held[0])


def _used(patterns: Floats, numbers: Ints) -> tuple[Pattern, ...]:
    return tuple(
        Pattern(patterns[index].astype(np.int64), float(numbers[index])) for index in np.flatnonzero(numbers)
    )


@frozen(eq=False)
class _Ways:
    """What ranks and hosts may hold.

    Args:
        shards: of each pattern, gangs apart: ``[N, K]``.
        sort: of the hosts whose ranks may hold it: ``[N]``; the first is that of hosts without gangs.
        gangs: of each sort of hosts: ``[G, K]``.
    """

    shards: Floats
    sort: Ints
    gangs: Floats

    @classmethod
    def of(cls, kinds: Kinds, patterns: Floats, watch: Watch) -> _Ways:
        """The sets of gangs of patterns; beside each, what any pattern holds else, if there is room, and time."""
        none = np.zeros((1, patterns.shape[1]))
        gangs = np.unique(np.vstack([none, np.where(kinds.is_gang, patterns, 0.0)]), axis=0)
        if len(gangs) == 1:
            return cls.without_gangs(patterns)
        alone = np.unique(np.where(kinds.is_gang, 0.0, patterns), axis=0)
        fits = [(alone @ kinds.size <= 1 + TOLERANCE - each @ kinds.size).all(axis=1) for each in gangs]
        shards = [alone[:0] if watch.is_over else _largest(alone[fitting]) for fitting in fits]
        sort = np.repeat(np.arange(len(gangs)), [len(each) for each in shards])
        return cls(np.concatenate(shards), sort, gangs)

    @classmethod
    def without_gangs(cls, patterns: Floats) -> _Ways:
        """Patterns that any rank may hold."""
        return cls(patterns, np.zeros(len(patterns), dtype=np.int64), np.zeros((1, patterns.shape[1])))


def _largest(patterns: Floats) -> Floats:
    """Patterns that are no part of another: ``[N', K]``; all, if they are too many to compare."""
    if len(patterns) > _MOST_COMPARED:
        return patterns
    held = [np.flatnonzero(pattern) for pattern in patterns]
    wholes = [
        int((patterns[:, own] >= pattern[own]).all(axis=1).sum())
        for pattern, own in zip(patterns, held, strict=True)
    ]
    kept: Floats = patterns[np.array(wholes) == 1]
    return kept


def _model(space: SearchSpace, kinds: Kinds, ways: _Ways, filled: FullPatterns | None) -> MixedProgram:
    """Columns: tables that take each option, ranks that hold each pattern, hosts of each sort.

    Rows: kinds; what is poured in; tables; what lies on every rank, by dimension; ranks of each sort of hosts.
    """
    from scipy.sparse import bmat, csr_matrix

    multiplicity, world_size = space.options.multiplicity, len(space.capacity_bytes)
    local, dims, num_sorts = space.topology.local_world_size, len(kinds.budget), len(ways.gangs)
    is_of = np.zeros((len(multiplicity), len(kinds.options)))
    is_of[kinds.table, np.arange(len(kinds.options))] = 1
    told = np.ones(len(kinds.size), dtype=bool) if filled is None else ~filled.is_small
    poured = kinds.size[~told, 0 if filled is None else filled.scarce] @ kinds.needs[~told]
    free = np.zeros(len(ways.shards)) if filled is None else filled.free
    of_sort = (ways.sort == np.arange(num_sorts)[:, None]).astype(np.float64)
    # Hosts of the first sort are all that there are, less the others.
    hosts = np.vstack([np.full(num_sorts, local), -local * np.eye(num_sorts)[1:]])
    blocks = [
        [
            csr_matrix(-kinds.needs[told]),
            csr_matrix(ways.shards.T[told]),
            csr_matrix(local * ways.gangs.T[told]),
        ],
        [csr_matrix(-poured[None]), csr_matrix(free[None]), None],
        [csr_matrix(is_of), None, None],
        [csr_matrix(kinds.spread.T), None, None],
        [None, csr_matrix(of_sort), csr_matrix(hosts)],
    ]
    least = int(told.sum()) + 1
    most_hosts = np.append(0, np.full(num_sorts - 1, world_size // local))
    most = [multiplicity[kinds.table], np.full(len(ways.shards), world_size), most_hosts]
    limits = np.append(world_size, np.zeros(num_sorts - 1))
    cost = [np.zeros(len(kinds.options)), of_sort[0], np.full(num_sorts, local)]
    return MixedProgram(
        cost=np.concatenate(cost).astype(np.float64),
        matrix=bmat(blocks, format="csr"),
        lower=np.concatenate([np.zeros(least), multiplicity, np.full(dims + num_sorts, -np.inf)]),
        upper=np.concatenate([np.full(least, np.inf), multiplicity, kinds.budget, limits]),
        most=np.concatenate(most).astype(np.float64),
        is_whole=np.ones(sum(map(len, most)), dtype=bool),
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
    seat(result.bins, kinds, whole.patterns, whole.hosts)
    result.fill()
    if not result.repair(_STEPS, changes=_CHANGES, pairs=_PAIRS):
        share_out(result.bins, _SHARINGS)
    return result
