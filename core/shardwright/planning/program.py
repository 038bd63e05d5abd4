"""Small planning problems as a mixed-integer program, and what the solver HiGHS makes of them.

Where there are few tables and ranks, duality proves little: what counts is which lumps go into one rank together. The
program is the problem itself, nothing relaxed: how many of the tables that are alike take each option, how many of its
shards go to each rank, and of its gangs to each host; the least largest rank's time within every memory. Equal things
are counted, not told apart. The solver's own bound is the proof; whoever doubts it solves the program again.

The solver is HiGHS (:mod:`shardwright.planning.solver`).

Legend: W ranks, H hosts, L ranks of each, D dimensions (time, then memory tiers).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from attrs import define, field, frozen

from shardwright.planning.bound import Certificate
from shardwright.planning.options import FREE, Floats, Ints
from shardwright.planning.program_options import Candidates
from shardwright.planning.solver import MixedProgram
from shardwright.planning.space import SearchSpace

# What is asked of the solver: a bound that is as close, and what it may do for that. Its tolerances are 1e-6.
PRECISION = 2.5e-3
TOLERANCE = 1e-5
MOST_NODES = 400


@frozen(eq=False)
class Part:
    """What may go to one place of several, of an option: a shard to any rank, or a gang to any host.

    Args:
        number: how many of these the option has.
        first: of the columns that count them, one a place.
        order: where its ``K`` shards that have their ranks with the place are among the option's free shards:
            ``[number, K]``.
        local: the rank inside its host of each of a gang's ``K`` shards; ``None`` for a shard alone: ``[K]``.
        inside: of a gang, its shards that may go to any rank of its host.
    """

    number: int
    first: int
    order: Ints
    local: Ints | None = None
    inside: tuple[Part, ...] = ()


@frozen(eq=False)
class Solution:
    """What the solver found.

    Args:
        bound_ms: no plan is faster; about the program's limit where there is none within it.
        proposal: the option of each of all tables: ``[A]``; ``None`` if no plan was found.
        ranks: of its shards that have none by their layout, in the order of tables and shards.
        nodes: how many nodes of its tree the solver looked at.
        precision: how near the solver was asked to come, relative.
    """

    bound_ms: float
    proposal: Ints | None = None
    ranks: Ints | None = None
    nodes: int = 0
    precision: float = PRECISION


@define(eq=False, slots=False)
class Program:
    """The program for plans that take no more than a time.

    Args:
        space: options and costs; rules on ranks are left out, which can only make plans faster.
        limit_ms: the time.
    """

    space: SearchSpace
    limit_ms: float
    columns: dict[int, int] = field(factory=dict)
    """Option -> the column that counts the tables that take it."""
    parts: dict[int, list[Part]] = field(factory=dict)
    most: list[float] = field(factory=list)
    """The largest value of each column."""
    entries: list[tuple[int, int, float]] = field(factory=list)
    """Row, column and value of what is not zero."""
    equals: list[float] = field(factory=list)
    """What the first rows are equal to; the others follow, at most 1 for memory and at most the time."""

    left_out: int = -1
    """The column that is 1 where no plan is found."""

    @classmethod
    def of(
        cls, space: SearchSpace, limit_ms: float, *, most_columns: int, keep: Collection[int] = ()
    ) -> Program | None:
        """The program, unless it is too large, or some table has no option.

        Args:
            space: options and costs.
            limit_ms: the time.
            most_columns: how large it may be.
            keep: options that it is to have even where others are as good.
        """
        program = cls(space, limit_ms)
        candidates = program._candidates
        if candidates.least_columns() > most_columns:
            return None
        chosen = sorted({*candidates.options(), *keep})
        if candidates.is_empty or candidates.num_columns(chosen) > most_columns:
            return None
        for option in chosen:
            program._add(option)
        program._choose_one_each(chosen)
        program._count_on_hosts()
        program._limit(chosen)
        return program

    @cached_property
    def _candidates(self) -> Candidates:
        return Candidates(self.space, self.limit_ms)

    @property
    def is_empty(self) -> bool:
        """Whether some table has no option that is as fast."""
        return self._candidates.is_empty

    # -- rows and columns ---------------------------------------------------------------------------------------

    def _new(self, count: int, most: float) -> int:
        first = len(self.most)
        self.most += [most] * count
        return first

    def _row(self, equals: float) -> int:
        self.equals.append(equals)
        return len(self.equals) - 1

    def _add(self, option: int) -> None:
        """The columns of an option, and the rows that every shard and gang is somewhere."""
        tables = int(self.space.options.multiplicity[self.space.options.table[option]])
        column = self.columns[option] = self._new(1, tables)
        alone, gangs = self._candidates.what_moves(option)
        self.parts[option] = [self._alone(column, tables, shards) for shards in alone]
        self.parts[option] += [self._gang(column, tables, members) for members in gangs]

    def _alone(self, column: int, tables: int, shards: Ints) -> Part:
        """Shards alone: as many as there are, over all ranks."""
        world_size, number = len(self.space.capacity_bytes), len(shards)
        first = self._new(world_size, tables * number)
        self._same_number(range(first, first + world_size), column, number)
        return Part(number, first, shards[:, None])

    def _gang(self, column: int, tables: int, members: list[tuple[int, Ints]]) -> Part:
        """A gang on some host; those of its shards that may go to any rank there are as many on each host."""
        topology = self.space.topology
        first = self._new(topology.num_hosts, tables)
        self._same_number(range(first, first + topology.num_hosts), column, 1)
        inside = []
        for local, shards in members:
            if local == FREE:
                start = self._new(topology.world_size, tables * len(shards))
                inside.append(Part(len(shards), start, shards[:, None]))
                for host in range(topology.num_hosts):
                    ranks = topology.local_world_size * host + np.arange(topology.local_world_size)
                    self._same_number((start + ranks).tolist(), first + host, len(shards))
        placed = [(local + np.arange(len(shards)), shards) for local, shards in members if local != FREE]
        empty = [np.empty(0, dtype=np.int64)]
        order = np.concatenate([shards for _, shards in placed] or empty)
        return Part(
            1, first, order[None], np.concatenate([places for places, _ in placed] or empty), tuple(inside)
        )

    def _same_number(self, columns: Sequence[int], other: int, times: int) -> None:
        """A row: some columns together are so many times another."""
        row = self._row(0.0)
        self.entries += [(row, column, 1.0) for column in columns]
        self.entries.append((row, other, -float(times)))

    def _choose_one_each(self, chosen: list[int]) -> None:
        options = self.space.options
        rows = {table: self._row(float(options.multiplicity[table])) for table in range(len(options.tables))}
        self.entries += [(rows[int(options.table[option])], self.columns[option], 1.0) for option in chosen]
        # All tables may be left out at the price of the limit: the solver always has a solution, and so a bound.
        self.left_out = self._new(1, 1.0)
        self.entries += [(row, self.left_out, self.equals[row]) for row in rows.values()]

    def _count_on_hosts(self) -> None:
        """How many tables lie on each host as a whole: whole numbers too, and the ones to branch on.

        Hosts are alike, and so are the tables' options: with any one of their columns settled, the rest of the solver's
        tree looks as before. With three tables on a host and not two, it does not.
        """
        topology = self.space.topology
        whole = [parts[0] for parts in self.parts.values() if len(parts) == 1 and parts[0].number == 1]
        if topology.num_hosts < 2 or all(part.local is None for part in whole):
            return
        local_size, tables = topology.local_world_size, float(self.space.options.multiplicity.sum())
        for host in range(topology.num_hosts):
            here = list[int]()
            for part in whole:
                places = local_size if part.local is None else 1
                here += range(part.first + host * places, part.first + (host + 1) * places)
            self._same_number(here, self._new(1, tables), 1)

    def _limit(self, chosen: list[int]) -> None:
        """What each rank holds, in parts of what it may: rows by dimension, then rank."""
        base = len(self.equals)
        for option in chosen:
            needs, fixed = self._candidates.free_needs(option)
            for rank, taken in fixed.items():
                self._take(base, self.columns[option], rank, taken / self._size[rank])
            for part in self.parts[option]:
                self._take_part(base, part, needs)
                for run in part.inside:
                    self._take_part(base, run, needs)

    def _take_part(self, base: int, part: Part, needs: Floats) -> None:
        """What a part takes of each place where it may be."""
        size, topology = self._size, self.space.topology
        if part.local is None:
            for rank in range(topology.world_size):
                self._take(base, part.first + rank, rank, needs[part.order[0, 0]] / size[rank])
            return
        for host in range(topology.num_hosts):
            for shard, local in zip(part.order[0].tolist(), part.local.tolist(), strict=True):
                rank = host * topology.local_world_size + local
                self._take(base, part.first + host, rank, needs[shard] / size[rank])

    def _take(self, base: int, column: int, rank: int, parts: Floats) -> None:
        world_size = len(self.space.capacity_bytes)
        for dimension, part in enumerate(parts.tolist()):
            if part:
                self.entries.append((base + dimension * world_size + rank, column, part))

    @cached_property
    def _size(self) -> Floats:
        """What each rank has, [W, D]."""
        size = np.column_stack(
            [np.full(len(self.space.capacity_bytes), self.limit_ms), self.space.capacity_bytes]
        )
        result: Floats = np.maximum(size, 1e-30)
        return result

    @property
    def num_columns(self) -> int:
        """How many whole numbers are to be chosen."""
        return len(self.most)

    def certificate(self, solution: Solution) -> Certificate:
        """The solver's bound, with what says that it is a solver's; see :mod:`shardwright.planning.proof_program`."""
        return Certificate(
            solution.bound_ms,
            {
                "program": {
                    "limit_ms": self.limit_ms,
                    "nodes": solution.nodes,
                    "precision": solution.precision,
                }
            },
        )

    # -- solving ------------------------------------------------------------------------------------------------

    def solve(
        self, *, most_nodes: int = MOST_NODES, seconds: float = np.inf, precision: float = PRECISION
    ) -> Solution:
        """Ask the solver.

        Args:
            most_nodes: how many nodes of its tree it may look at.
            seconds: how long it may take.
            precision: it ends where its bound is within this part of its best solution.
        """
        found = self._solved(most_nodes, seconds, precision)
        if found.x is None:
            return Solution(0.0)
        bound_ms = max(0.0, found.mip_dual_bound * (1 - TOLERANCE)) * self.limit_ms
        numbers, nodes = np.rint(found.x[:-1]).astype(np.int64), int(found.mip_node_count)
        if numbers[self.left_out]:
            return Solution(bound_ms, nodes=nodes, precision=precision)
        return Solution(bound_ms, *self.plan(numbers), nodes=nodes, precision=precision)

    def _solved(self, most_nodes: int, seconds: float, precision: float) -> Any:
        from scipy.sparse import csr_matrix

        world_size, columns = len(self.space.capacity_bytes), len(self.most) + 1
        base, dims = len(self.equals), 1 + len(self.space.tiers)
        time = [(base + rank, columns - 1, -1.0) for rank in range(world_size)]
        row, column, value = zip(*self.entries, *time, strict=True)
        limits = np.repeat([0.0] + [1.0] * (dims - 1), world_size)
        cost = np.zeros(columns)
        cost[[-1, self.left_out]] = 1
        program = MixedProgram(
            cost=cost,
            matrix=csr_matrix((value, (row, column)), shape=(base + dims * world_size, columns)),
            lower=np.concatenate([self.equals, np.full(len(limits), -np.inf)]),
            upper=np.concatenate([self.equals, limits]),
            most=np.array([*self.most, 1.0]),
            is_whole=np.arange(columns) < columns - 1,
        )
        return program.solve(most_nodes=most_nodes, seconds=seconds, precision=precision)

    def plan(self, numbers: Ints) -> tuple[Ints, Ints]:
        """The plan that has so many of each: of tables that are alike, the first ones take the first options.

        Args:
            numbers: of every column: ``[N]``.

        Returns:
            The option of each of all tables, and the ranks of their free shards in the order of tables and shards.
        """
        options = self.space.options
        proposal = np.zeros(len(options.alike), dtype=np.int64)
        ranks: list[Ints] = [np.empty(0, dtype=np.int64)] * len(proposal)
        left = {
            table: np.flatnonzero(options.alike == table).tolist() for table in range(len(options.tables))
        }
        for option, column in self.columns.items():
            mine = left[int(options.table[option])]
            tables, mine[:] = mine[: numbers[column]], mine[numbers[column] :]
            proposal[tables] = option
            for table, where in zip(tables, self._placed(option, numbers), strict=False):
                ranks[table] = where
        return proposal, np.concatenate(ranks)

    def _placed(self, option: int, numbers: Ints) -> Iterator[Ints]:
        """The ranks of an option's free shards, table after table."""
        free = self.space.options.rank[self.space.options.shards_of(option)] == FREE
        size = int(self.space.options.count[self.space.options.shards_of(option)][free].sum())
        local_size = self.space.topology.local_world_size
        places = {part.first: self._places(part, numbers) for part in self._all_parts(option)}
        for _ in range(int(numbers[self.columns[option]])):
            where = np.full(size, FREE)
            for part in self.parts[option]:
                for shards in part.order:
                    if part.local is None:
                        where[shards] = places[part.first].pop()
                        continue
                    host = places[part.first].pop()
                    where[shards] = host * local_size + part.local
                    for run in part.inside:
                        here = [rank for rank in places[run.first] if rank // local_size == host]
                        for shard, rank in zip(run.order[:, 0].tolist(), here, strict=False):
                            where[shard] = rank
                            places[run.first].remove(rank)
            yield where

    def _all_parts(self, option: int) -> Iterator[Part]:
        for part in self.parts[option]:
            yield part
            yield from part.inside

    def _places(self, part: Part, numbers: Ints) -> list[int]:
        """Every place as often as the solution says."""
        topology = self.space.topology
        places = topology.world_size if part.local is None else topology.num_hosts
        return np.repeat(np.arange(places), numbers[part.first : part.first + places]).tolist()
