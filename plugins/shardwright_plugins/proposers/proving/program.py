"""Small planning problems as a mixed-integer program, and what the solver HiGHS makes of them.

Where there are few tables and ranks, duality proves little: what counts is which lumps go into one rank together. The
program is the problem itself, nothing relaxed. Its whole numbers say how many of the tables that are alike take each
option, how many of the option's shards go to each rank, and how many of its gangs to each host: equal things are
counted, not told apart. It minimises ``v``, the largest rank's time in parts of a limit, within every memory:

    sum of the counts at rank r times what each takes of r's time  <=  v,    of r's memory  <=  1

What a shard takes of a rank's time depends on the rank's class of speed.

The solver's own bound is the proof: :mod:`shardwright_plugins.proposers.proving.proof` makes the program of the claim
from the options' columns, and solves it.

Legend: W ranks, C classes of ranks, H hosts of L ranks, D dimensions (time, then memory tiers), N columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import define, field, frozen

from shardwright.planning.arrays import FREE, NO_GANG, Bools, Floats, Ints
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.placement import Proven
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.solver import Entries, MixedProgram

# The solver is exact to a millionth; a bound is lowered by this part, so that the check comes to no other end.
_TOLERANCE = 1e-5
# The nodes of the solver's tree, times columns.
_NODE_COLUMNS, _LEAST_NODES = 150_000, 50


@frozen(eq=False)
class Run:
    """Equal shards of an option that may go to several places, with the columns that count them.

    Args:
        needs: time of each shard on a rank of each class, then memory: ``[C + M]``.
        shards: positions of its shards among the option's free shards.
        first: the first of the columns, one a rank; -1 for shards that have their ranks with their gang's host.
        local: the rank inside its host that the first of a gang's shards must have, or ``FREE``.
        gang_first: the first of the columns that count its gang, one a host; -1 for shards that need no other.
    """

    needs: Floats
    shards: Ints
    first: int = -1
    local: int = FREE
    gang_first: int = -1


@define(eq=False)
class Program:
    """The program of plans that take no more than a time; made by :meth:`of`.

    Args:
        space: options and costs; rules on ranks are left out, which can only make plans faster.
        limit_ms: the time.
    """

    space: SearchSpace
    limit_ms: float
    _columns: dict[int, int] = field(factory=dict)
    """Option -> the column that counts the tables that take it."""
    _runs: dict[int, list[Run]] = field(factory=dict)
    """Option -> its runs that have no rank by their layout."""
    _most: list[float] = field(factory=list)
    """The largest value of each column."""
    _terms: list[tuple[int, int, float]] = field(factory=list)
    """Row, column and factor of the equations."""
    _equals: list[float] = field(factory=list)
    """Right sides of the equations."""
    _loads: list[tuple[int, int, Floats]] = field(factory=list)
    """Rank, column, and what one that it counts takes there: ``[D]``."""

    @classmethod
    def of(cls, space: SearchSpace, limit_ms: float, most_columns: int) -> Program | None:
        """The program, unless it is too large, or some table has no option."""
        if not has_options(space, limit_ms):
            return None
        can = _usable(space, limit_ms)
        program = cls(space, limit_ms)
        for table, multiplicity in enumerate(space.options.multiplicity.tolist()):
            mine = _undominated(space, [o for o in space.options.of_table(table) if can[o]])
            for option in mine:
                program._add(option, float(multiplicity))
            program._equate([program._columns[option] for option in mine], float(multiplicity))
            if program.num_columns > most_columns:
                return None
        program._count_on_hosts()
        return program

    @property
    def num_columns(self) -> int:
        """Count of whole numbers to choose."""
        return len(self._most)

    # -- columns and equations ----------------------------------------------------------------------------------

    def _new(self, count: int, most: float) -> int:
        self._most += [most] * count
        return len(self._most) - count

    def _equate(self, columns: Sequence[int], right: float, *others: tuple[int, float]) -> None:
        """A row: some columns together, and others times a factor, are a number."""
        row = len(self._equals)
        self._equals.append(right)
        self._terms += [(row, column, 1.0) for column in columns]
        self._terms += [(row, column, factor) for column, factor in others]

    def _add(self, option: int, tables: float) -> None:
        """The columns of an option, the equations that every shard is somewhere, and what that takes."""
        options, topology = self.space.options, self.space.topology
        column = self._columns[option] = self._new(1, tables)
        self._runs[option], gangs, at = [], dict[int, int](), 0
        runs = options.shards_of(option)
        for run in range(runs.start, runs.stop):
            count, gang, local = (int(x[run]) for x in (options.count, options.gang, options.local_rank))
            needs = np.append(self.space.class_ms[run], self.space.memory_bytes[run])
            if options.rank[run] != FREE:
                self._load(column, int(options.rank[run]), count, needs)
                continue
            shards = np.arange(at, at + count)
            at += count
            if gang == NO_GANG:
                first = self._spread_out(column, range(topology.world_size), count, tables, needs)
                self._runs[option].append(Run(needs, shards, first))
                continue
            if gang not in gangs:
                gangs[gang] = self._new(topology.num_hosts, tables)
                hosts = range(gangs[gang], gangs[gang] + topology.num_hosts)
                self._equate(hosts, 0.0, (column, -1.0))
            first = -1 if local != FREE else self.num_columns
            for host in range(topology.num_hosts):
                here = range(host * topology.local_world_size, (host + 1) * topology.local_world_size)
                if local == FREE:
                    self._spread_out(gangs[gang] + host, here, count, tables, needs)
                else:
                    self._load(gangs[gang] + host, here.start + local, count, needs)
            self._runs[option].append(Run(needs, shards, first, local, gangs[gang]))

    def _spread_out(self, of: int, ranks: range, count: int, tables: float, needs: Floats) -> int:
        """Add columns for shards, on any of some ranks, of each that a column counts; return the first of them."""
        first = self._new(len(ranks), tables * count)
        self._equate(range(first, first + len(ranks)), 0.0, (of, -float(count)))
        for place, rank in enumerate(ranks):
            self._load(first + place, rank, 1, needs)
        return first

    def _load(self, column: int, first_rank: int, count: int, needs: Floats) -> None:
        """Put a shard on each of some ranks in turn, for each that the column counts."""
        times, memory = np.split(needs, [self.space.class_ms.shape[1]])
        by_class, rank_class = [np.append(own, memory) for own in times], self.space.topology.rank_class
        for rank in range(first_rank, first_rank + count):
            if (memory <= self.space.capacity_bytes[rank]).all():
                self._loads.append((rank, column, by_class[rank_class[rank]]))
            else:  # it fits on no such rank: the column counts none
                self._most[column] = 0.0

    def _count_on_hosts(self) -> None:
        """Count the tables that lie on each host as a whole: whole numbers too, and the ones to branch on.

        Hosts are alike, and so are the tables' options: with any one of their columns settled, the rest of the
        solver's tree looks as before. With three tables on a host and not two, it does not.
        """
        topology = self.space.topology
        whole = [
            r[0] for r in self._runs.values() if len(r) == 1 and (len(r[0].shards) == 1 or r[0].first < 0)
        ]
        if topology.num_hosts < 2 or all(run.gang_first < 0 for run in whole):
            return
        for host in range(topology.num_hosts):
            here, ranks = list[int](), np.arange(topology.local_world_size) + host * topology.local_world_size
            for run in whole:
                here += [run.gang_first + host] if run.gang_first >= 0 else (run.first + ranks).tolist()
            count = self._new(1, float(self.space.options.multiplicity.sum()))
            self._equate(here, 0.0, (count, -1.0))

    # -- solving ------------------------------------------------------------------------------------------------

    def solve(
        self, effort: Effort, watch: Watch, part: float = 1.0
    ) -> tuple[Proven, tuple[Ints, Ints] | None]:
        """Ask the solver.

        Args:
            effort: amount of work that may be done.
            watch: ends it, and counts its work.
            part: part of the nodes of the solver's tree that it may look at.

        Returns:
            The bound that it proves; and the option of each of all tables ``[A]``, with the ranks of their free
            shards in the order of tables and shards, or ``None`` if no plan was found.
        """
        nodes = int(part * np.clip(_NODE_COLUMNS / self.num_columns, _LEAST_NODES, effort.program_nodes))
        found = self.mixed().solve(most_nodes=nodes, precision=effort.precision, watch=watch)
        bound_ms = max(0.0, found.bound * (1 - _TOLERANCE)) * self.limit_ms
        data = {"limit_ms": self.limit_ms, "nodes": found.nodes, "precision": effort.precision}
        proven = Proven(bound_ms, {"z_ms": bound_ms, "program": data})
        numbers = None if found.x is None else np.rint(found.x).astype(np.int64)
        return proven, None if numbers is None or numbers[-2] else self.plan(numbers)

    def mixed(self, price: float = 1.0, *, may_fail: bool = True) -> MixedProgram:
        """The program for the solver.

        Columns: the numbers, 1 where there is no plan, ``v``. Rows: the equations, then ranks by dimension. All tables
        may be left out at a price, so that the solver always has a solution, and a bound.

        Args:
            price: the price, and the largest ``v``, in parts of the limit.
            may_fail: true if all tables may be left out; else there may be no solution.
        """
        world_size, none, value = len(self.space.capacity_bytes), len(self._most), len(self._most) + 1
        has = np.column_stack([np.full(world_size, self.limit_ms), self.space.capacity_bytes])
        base, dims = len(self._equals), has.shape[1]
        terms = [(row, none, right) for row, right in enumerate(self._equals) if right]
        terms += [(base + rank, value, -1.0) for rank in range(world_size)]
        terms += [
            (base + dimension * world_size + rank, column, part)
            for rank, column, needs in self._loads
            for dimension, part in enumerate((needs / np.maximum(has[rank], 1e-30)).tolist())
            if part
        ]
        row, column, factor = (np.array(each) for each in zip(*self._terms, *terms, strict=True))
        cost = np.zeros(value + 1)
        cost[[none, value]] = price, 1.0
        limits = np.repeat([0.0] + [1.0] * (dims - 1), world_size)
        return MixedProgram(
            cost=cost,
            matrix=Entries(row, column, factor),
            lower=np.concatenate([self._equals, np.full(len(limits), -np.inf)]),
            upper=np.concatenate([self._equals, limits]),
            most=np.array([*self._most, float(may_fail), price]),
            is_whole=np.arange(value + 1) < value,
        )

    def plan(self, numbers: Ints) -> tuple[Ints, Ints]:
        """The plan that has so many of each, ``[N]``: of tables that are alike, the first take the first options."""
        options = self.space.options
        proposal = np.zeros(len(options.distinct_table), dtype=np.int64)
        ranks: list[Ints] = [np.empty(0, dtype=np.int64)] * len(proposal)
        number = len(options.tables)
        left = [np.flatnonzero(options.distinct_table == table).tolist() for table in range(number)]
        for option, column in self._columns.items():
            mine = left[int(options.table[option])]
            tables, mine[:] = mine[: numbers[column]], mine[numbers[column] :]
            proposal[tables] = option
            for table, where in zip(tables, self._placed(option, numbers), strict=False):
                ranks[table] = where
        return proposal, np.concatenate(ranks)

    def _placed(self, option: int, numbers: Ints) -> Iterator[Ints]:
        """The ranks of an option's free shards, table after table."""
        topology, runs = self.space.topology, self._runs[option]
        size = topology.local_world_size
        hosts = {run.gang_first: _repeated(numbers, run.gang_first, topology.num_hosts) for run in runs}
        places = [_repeated(numbers, run.first, topology.world_size) for run in runs]
        for _ in range(int(numbers[self._columns[option]])):
            where = np.full(sum(len(run.shards) for run in runs), FREE)
            host_of = {gang: found.pop() for gang, found in hosts.items() if gang >= 0}
            for run, free in zip(runs, places, strict=True):
                if run.first < 0:
                    where[run.shards] = (
                        host_of[run.gang_first] * size + run.local + np.arange(len(run.shards))
                    )
                    continue
                host = host_of.get(run.gang_first)
                mine = [rank for rank in free if host is None or rank // size == host][: len(run.shards)]
                where[run.shards] = mine
                for rank in mine:
                    free.remove(rank)
            yield where


def _repeated(numbers: Ints, first: int, count: int) -> list[int]:
    """Every place as often as its column says; none if there are no columns."""
    return np.repeat(np.arange(count), numbers[first : first + count]).tolist() if first >= 0 else []


def has_options(space: SearchSpace, limit_ms: float) -> bool:
    """True if each table has an option of which no shard takes more than a time, and each fits somewhere."""
    return bool(np.logical_or.reduceat(_usable(space, limit_ms), space.options.first_option[:-1]).all())


def _usable(space: SearchSpace, limit_ms: float) -> Bools:
    usable: Bools = space.fits_alone & (space.largest_cost_ms <= limit_ms)
    return usable


def _undominated(space: SearchSpace, options: list[int]) -> list[int]:
    """The options of a table that no other may take the place of in any plan.

    One may if its shards go where the other's are and take no more; or if it is one shard that may go anywhere, and
    takes no more than some shard of the other. Of two that are equal, the first one stays.
    """
    columns = space.options
    needs = {
        option: np.column_stack([space.class_ms[runs], space.memory_bytes[runs]])
        for option in options
        for runs in [columns.shards_of(option)]
    }
    places = {option: _places_of(columns, option) for option in options}
    single = [option for option in options if _is_single(space, option)]

    def replaces(one: int, other: int) -> bool:
        if places[one] == places[other]:
            less = bool((needs[one] <= needs[other]).all())
            return less and (one < other or bool((needs[one] < needs[other]).any()))
        return one in single and bool((needs[one][0] <= needs[other]).all(axis=1).any())

    return [other for other in options if not any(replaces(one, other) for one in options if one != other)]


def _places_of(options: Options, option: int) -> bytes:
    """Encode the places that an option's shards may take; equal for options whose shards may be placed alike."""
    runs = options.shards_of(option)
    _, gang = np.unique(options.gang[runs], return_inverse=True)
    is_alone = options.gang[runs] == NO_GANG
    columns = (options.count[runs], options.rank[runs], options.local_rank[runs], gang.reshape(-1), is_alone)
    return np.stack(columns).tobytes()


def _is_single(space: SearchSpace, option: int) -> bool:
    """True if an option is one shard that may go anywhere."""
    options, runs = space.options, space.options.shards_of(option)
    is_free = options.rank[runs.start] == FREE and options.gang[runs.start] == NO_GANG
    return bool(runs.stop - runs.start == 1 and is_free and options.count[runs.start] == 1)
