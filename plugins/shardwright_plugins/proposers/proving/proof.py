"""The proof of a bound by a mixed-integer program, stated anew: all plans that would be faster, and there are none.

The program is made from the options' columns alone, and nothing of it is the search's but the solver, HiGHS. Its whole
numbers say how many of the tables that are alike take each option, how many of a run's free shards are on each rank,
and how many of an option's gangs on each host, and, where there are gangs, how many of these and of whole tables are on
each host together; each rank's time and memory then is a sum. The solver first may also say
"no plan", at the price of a time a little above the claim, so that it always has a solution to compare others with, and
its bound is to reach the claim; where it ends with a plan between the two, it is to find that there is none below.

Options that another one of the table can replace in any plan are left out, so that there are fewer numbers: one whose
shards may go to the same places and need no more, or one shard alone, free to go anywhere, that needs no more than some
shard of the option does.

Legend: W ranks, H hosts, D dimensions (time, then memory tiers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shardwright.planning.arrays import FREE, NO_GANG, Floats
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.proving.solver import Entries, MixedProgram, MixedSolution

MOST_COLUMNS = 100_000
_TOLERANCE = 1e-5  # of the solver's bound; its own are 1e-6
_SOLVED = 2e-5  # part of a time by which the solver's tolerances of 1e-6 may be wrong
_LEAST_PRECISION = 0.1
_NODES = 4000  # of the solver's tree, beside a multiple of those that the search looked at
_MOST_NODES = 500_000


def why_unproven(space: SearchSpace, z_ms: float, data: Mapping[str, Any], watch: Watch) -> str:
    """Check a certificate: :func:`why_not_empty`, within what the solver can tell apart."""
    return why_not_empty(space, z_ms * (1 - _SOLVED), data, watch)


def why_not_empty(space: SearchSpace, z_ms: float, data: Mapping[str, Any], watch: Watch) -> str:
    """Explain why it is not proven that no plan takes less than ``z_ms``; empty if it is.

    Args:
        space: options and costs; rules on ranks are left out, which can only make plans faster.
        z_ms: the claim.
        data: data of the certificate. ``nodes``: nodes of the solver's tree that the search looked at. ``precision``:
            relative precision of the bound it asked for. Both say what it takes, not what is proven.
        watch: ends the check.
    """
    plans = _Plans(space, z_ms)
    if not plans.is_any:
        return ""
    if len(plans.most) > MOST_COLUMNS:
        return f"it takes {len(plans.most)} numbers to state all plans; {MOST_COLUMNS} are the most that are tried"
    most_nodes = min(20 * max(int(data["nodes"]), 0) + _NODES, _MOST_NODES)
    precision = min(max(float(data["precision"]), _TOLERANCE), _LEAST_PRECISION)
    bound = plans.solved(1 / (1 - precision), most_nodes, precision, watch).bound
    if bound >= 1 - _TOLERANCE or plans.solved(1.0, most_nodes, precision, watch).is_infeasible:
        return ""
    return f"the solver proves {bound * z_ms} ms"


class _Plans:
    """Whole numbers that are a plan in which every rank takes less than ``z_ms``."""

    def __init__(self, space: SearchSpace, z_ms: float) -> None:
        self._space, self._options = space, space.options
        self._world_size = len(space.capacity_bytes)
        cost = sum(space.phases.values(), np.zeros(space.options.num_shards))
        self._needs: Floats = np.column_stack([cost, space.memory_bytes])
        self._has: Floats = np.column_stack([np.full(self._world_size, z_ms), space.capacity_bytes])
        self._has = np.maximum(self._has, 1e-300)
        self.most: list[float] = []  # of each column
        self._equal: list[float] = []  # right sides of equations
        self._terms: list[tuple[int, int, float]] = []  # of equations: row, column, factor
        self._loads: list[
            tuple[int, int, Floats]
        ] = []  # of ranks: rank, column, and what one of it takes, [D]
        self._none = self._column(1.0)
        # Columns of what lies on each host: their sums are whole numbers to branch on, and leave out nothing.
        self._whole: list[list[int]] = [[] for _ in range(space.topology.num_hosts)]
        self.is_any = all([self._state(table) for table in range(len(space.options.tables))])
        if space.topology.num_hosts > 1 and (space.options.gang != NO_GANG).any():
            for whole in self._whole:
                self._equate(whole, 0.0, (self._column(sum(self.most[column] for column in whole)), -1.0))

    def _state(self, table: int) -> bool:
        """The numbers of a table's options; whether there are any."""
        fitting = (self._needs <= self._has.max(axis=0)).all(axis=1) & (self._needs[:, 0] < self._has[0, 0])
        usable = [o for o in self._options.of_table(table) if fitting[self._options.shards_of(o)].all()]
        number = float(self._options.multiplicity[table])
        columns = [self._state_option(option, number) for option in self._without_replaceable(usable)]
        self._equate(columns, number, (self._none, number))
        return bool(columns)

    def _state_option(self, option: int, number: float) -> int:
        options, hosts = self._options, dict[int, list[int]]()
        taken = self._column(number)
        runs = options.shards_of(option)
        local_size, num_hosts = self._space.topology.local_world_size, self._space.topology.num_hosts
        for run in range(runs.start, runs.stop):
            count, gang = int(options.count[run]), int(options.gang[run])
            if options.rank[run] != FREE:
                self._load(taken, run, int(options.rank[run]), count)
                continue
            if gang == NO_GANG:
                columns = self._anywhere(taken, run, range(self._world_size), number)
                if len(options.count[runs]) == count == 1:
                    self._note_whole(columns)
                continue
            if gang not in hosts:
                hosts[gang] = [self._column(number) for _ in range(num_hosts)]
                self._equate(hosts[gang], 0.0, (taken, -1.0))
                self._note_whole(hosts[gang])
            for host, here in enumerate(hosts[gang]):
                first = host * local_size
                if options.local_rank[run] == FREE:
                    self._anywhere(here, run, range(first, first + local_size), number)
                else:
                    self._load(here, run, first + int(options.local_rank[run]), count)
        return taken

    def _note_whole(self, columns: list[int]) -> None:
        """Columns of what lies on one host together, as many for each host in turn."""
        each = len(columns) // len(self._whole)
        for host, whole in enumerate(self._whole):
            whole += columns[host * each : (host + 1) * each]

    def _anywhere(self, of: int, run: int, ranks: Iterable[int], number: float) -> list[int]:
        """All shards of a run, for each one that is counted by a column, on some of these ranks."""
        count = int(self._options.count[run])
        columns = [self._column(number * count) for _ in ranks]
        self._equate(columns, 0.0, (of, -float(count)))
        for rank, column in zip(ranks, columns, strict=True):
            self._load(column, run, rank, 1)
        return columns

    def _column(self, most: float) -> int:
        self.most.append(most)
        return len(self.most) - 1

    def _equate(self, columns: Iterable[int], right: float, *others: tuple[int, float]) -> None:
        row = len(self._equal)
        self._equal.append(right)
        self._terms += [(row, column, 1.0) for column in columns]
        self._terms += [(row, column, factor) for column, factor in others]

    def _load(self, column: int, run: int, first_rank: int, count: int) -> None:
        """Add the load of a run's shards on ``count`` ranks in turn, for each that the column counts."""
        for rank in range(first_rank, first_rank + count):
            if (self._needs[run, 1:] <= self._space.capacity_bytes[rank]).all():
                self._loads.append((rank, column, self._needs[run] / self._has[rank]))
            else:  # no rank holds more than it has: the column counts none
                self.most[column] = 0.0

    def _without_replaceable(self, options: list[int]) -> list[int]:
        """Options of one table, of which none can take another's place; see the module."""
        needs = {option: self._needs[self._options.shards_of(option)] for option in options}
        where = {option: self._places(option) for option in options}
        lone = [option for option in options if where[option] == [(1, FREE, FREE, 0)]]

        def replaces(one: int, other: int) -> bool:
            if where[one] == where[other]:
                less = (needs[one] <= needs[other]).all()
                return bool(less and (one < other or (needs[one] < needs[other]).any()))
            return one in lone and bool((needs[one][0] <= needs[other]).all(axis=1).any())

        return [one for one in options if not any(replaces(other, one) for other in options if other != one)]

    def _places(self, option: int) -> list[tuple[int, int, int, int]]:
        """List where an option's runs may be: their counts, ranks, ranks inside the host, and gangs, from 1 on."""
        options, runs = self._options, self._options.shards_of(option)
        known = {NO_GANG: 0}
        gangs = [known.setdefault(gang, len(known)) for gang in options.gang[runs].tolist()]
        columns = (options.count[runs], options.rank[runs], options.local_rank[runs])
        return list(zip(*(column.tolist() for column in columns), gangs, strict=True))

    def solved(self, price: float, most_nodes: int, precision: float, watch: Watch) -> MixedSolution:
        """Ask the solver for the least time of the slowest rank, in parts of ``z_ms``.

        Args:
            price: cost of "no plan", and the most that a plan may cost; at 1, there must be a plan.
            most_nodes: largest number of nodes of the solver's tree.
            precision: the part of its best solution within which its bound is to be.
            watch: ends it, and counts its work.
        """
        time, base, dims = len(self.most), len(self._equal), self._has.shape[1]
        terms = [*self._terms, *((base + rank * dims, time, -1.0) for rank in range(self._world_size))]
        terms += [
            (base + rank * dims + dimension, column, part)
            for rank, column, parts in self._loads
            for dimension, part in enumerate(parts.tolist())
        ]
        row, column, factor = (np.array(each) for each in zip(*terms, strict=True))
        cost = np.zeros(time + 1)
        cost[[self._none, time]] = price, 1.0
        limits = np.tile(np.array([0.0] + [1.0] * (dims - 1)), self._world_size)
        most = np.array([*self.most, price])
        most[self._none] = float(price > 1)
        program = MixedProgram(
            cost=cost,
            matrix=Entries(row, column, factor),
            lower=np.concatenate([self._equal, np.full(len(limits), -np.inf)]),
            upper=np.concatenate([self._equal, limits]),
            most=most,
            is_whole=np.arange(time + 1) < time,
        )
        return program.solve(most_nodes=most_nodes, precision=precision, watch=watch)
