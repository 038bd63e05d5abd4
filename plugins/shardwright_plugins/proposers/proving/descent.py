"""Options and ranks at once, by descent of a smooth measure of how full ranks are.

With loads as parts of their limits, ``x[r, d]``, the measure is the sum over ranks and dimensions of ``exp(a (x -
1))``: a rank near a limit weighs much, one far from it nothing, and with a rising ``a`` the fullest rank is all that
counts (the potential that greedy vector scheduling is analysed with: Chekuri and Khanna 2004; Azar et al. 2013). What
one more shard of size ``s`` adds on rank ``r`` is ``sum over d of exp(a (x[r, d] - 1)) (exp(a s[d]) - 1)``: a product
of two matrices for all shards and ranks. So in each round all tables are asked at once what they would gain by
another option or other ranks, and the best of them change, one after the other.

Legend: A tables, K runs of equal shards (of the options in question), W ranks, H hosts of L ranks, D dimensions
(time by class of ranks, of which a rank has its own's limit alone, then memory tiers).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import FREE, NO_GANG, Bools, Floats, Ints, distinct
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.packing.assignment import Assignment
from shardwright_plugins.proposers.proving.packing.bins import largest, limits

# Tables that are tried in a round, as many as there are ranks, times; and tries in vain.
_MOST_TRIED, _MOST_VAIN = 2, 8
# Tables that are asked in a round what they would gain: those that would take most away.
_MOST_ASKED = 256
# What is as full after a descent is given up.
_HOPELESS = 1.25
# A change must make the measure less by this part of it.
_LEAST_GAIN = 1e-7
# Loads above this part of a limit count no more: all numbers stay finite.
_MOST_LOAD = 1.8
# Microseconds of a call, and of each number of the matrix of runs and ranks (measured).
_CALL_US, _CELL_US = 120.0, 0.02


@frozen(eq=False)
class Menu:
    """The runs of the options that a table may choose from: what they take, and where they may go.

    Args:
        options: the options: ``[O']``.
        run_option: the option of each run, as a position in ``options``: ``[K]``.
        size: load of each of its shards, in parts of the largest limit: ``[K, D]``.
        count: number of its shards: ``[K]``.
        start: the rank of the first, or ``FREE``: ``[K]``.
        gang: ``[K]``.
        local: the rank inside the host of the first, or ``FREE``: ``[K]``.
    """

    options: Ints
    run_option: Ints
    size: Floats
    count: Ints
    start: Ints
    gang: Ints
    local: Ints

    @classmethod
    def of(cls, space: SearchSpace, options: Ints, limit: Floats) -> Menu:
        """The menu of some options, given in rising order.

        Args:
            space: options and costs.
            options: ``[O']``.
            limit: the largest limit of each dimension: ``[D]``.
        """
        columns = space.options
        first, stop = columns.first_shard[options], columns.first_shard[options + 1]
        number = stop - first
        run = np.repeat(first - np.cumsum(number) + number, number) + np.arange(int(number.sum()))
        needs = np.column_stack([space.class_ms[run], space.memory_bytes[run]])
        return cls(
            options=options,
            run_option=np.repeat(np.arange(len(options)), number),
            size=needs / limit,
            count=columns.count[run],
            start=columns.rank[run],
            gang=columns.gang[run],
            local=columns.local_rank[run],
        )


@frozen(eq=False)
class Places:
    """Places of a table's shards that have no rank by their layout, and the load of all its shards.

    Args:
        ranks: ranks of these shards, in the order of runs: ``[N]``.
        touched: ranks where something is, each once; all of them where a layout gives ranks.
        taken: load of the table there: ``[len(touched), D]``.
    """

    ranks: Ints
    touched: Ints
    taken: Floats


class Descent:
    """One option for each table and ranks for its shards, improved towards a limit.

    Args:
        space: options and costs.
        is_efficient: the options worth a look: ``[O]``.
        limit_ms: the time that no rank should exceed.
        effort: amount of work that may be done.
        watch: ends it, and counts its work.
    """

    def __init__(
        self, space: SearchSpace, is_efficient: Bools, limit_ms: float, effort: Effort, watch: Watch
    ) -> None:
        self._space, self._effort, self._watch = space, effort, watch
        rank_class, num_classes = space.topology.rank_class, space.class_ms.shape[1]
        self._limits: Floats = limits(limit_ms, rank_class, space.capacity_bytes)
        self._most: Floats = np.maximum(largest(self._limits, num_classes), 1e-30)
        allowed = is_efficient & (space.largest_cost_ms <= limit_ms)
        self._allowed = allowed
        self.local_size = space.topology.local_world_size
        self._alike = space.options.distinct_table
        self._menus: dict[int, Menu] = {}
        self._alone: dict[int, Menu] = {}
        self._joint: dict[bytes, Menu] = {}
        # Loads count from the limit of each rank down; without a limit, from so far down that they never count.
        self._used: Floats = 1 - self._limits / self._most
        self._sharpness = effort.sharpness[0]
        self.proposal: Ints = np.empty(0, dtype=np.int64)
        self._places: list[Places] = []

    # -- where it stands -------------------------------------------------------------------------------------

    def begin(self, proposal: Ints, ranks: Sequence[Ints]) -> None:
        """Begin with a plan: the option of each table ``[A]``, and the ranks of its shards without a rank by layout."""
        self.proposal = proposal.copy()
        known, numbers = dict[tuple[int, bytes], Places](), dict[tuple[int, bytes], int]()
        keys = [(option, where.tobytes()) for option, where in zip(proposal.tolist(), ranks, strict=True)]
        for key, where in zip(keys, ranks, strict=True):
            if key not in known:
                known[key] = self._taken_by(key[0], where)
            numbers[key] = numbers.get(key, 0) + 1
        for key, places in known.items():
            self._used[places.touched] += numbers[key] * places.taken
        self._places = [known[key] for key in keys]

    @property
    def ranks(self) -> list[Ints]:
        """Ranks of each table's shards without a rank by layout."""
        return [places.ranks for places in self._places]

    @property
    def fullest(self) -> float:
        """Load of the fullest rank in its fullest dimension, in parts of the limit."""
        return float(self._used.max())

    def _taken_by(self, option: int, ranks: Ints) -> Places:
        if option not in self._alone:
            self._alone[option] = Menu.of(self._space, np.array([option]), self._most)
        menu, at = self._alone[option], 0
        if len(ranks) == 1 and len(menu.count) == 1:
            return Places(ranks, ranks, menu.size)
        used = np.zeros_like(self._used)
        for run in range(len(menu.count)):
            count = int(menu.count[run])
            if menu.start[run] != FREE:
                used[menu.start[run] : menu.start[run] + count] += menu.size[run]
            else:
                np.add.at(used, ranks[at : at + count], menu.size[run])
                at += count
        touched = np.flatnonzero(used.any(axis=1))
        return Places(ranks, touched, used[touched])

    @property
    def measure(self) -> float:
        """Compute the measure that descends."""
        return float(self._weight().sum())

    # -- descending ------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Descend, ever more sharply; whether all is within limits."""
        for sharpness in self._effort.sharpness:
            self._sharpness = sharpness
            for _ in range(self._effort.descent_rounds):
                if self.fullest <= 1:
                    return True
                if self._watch.is_over or not self.round():
                    break
            if self.fullest > _HOPELESS:
                break
        return self.fullest <= 1

    def round(self) -> int:
        """Change the tables that gain most; how many changed."""
        gain = self._gains()
        least = _LEAST_GAIN * self.measure
        order = np.argsort(gain, kind="stable")
        order = order[gain[order] < -least]
        changed = failed = 0
        for table in order[: _MOST_TRIED * len(self._used)].tolist():
            if self._change(table, least):
                changed += 1
            else:
                failed += 1
                if failed > _MOST_VAIN + changed:
                    break
        return changed

    def _weight(self) -> Floats:
        """``exp(a (x - 1))``: ``[W, D]``."""
        result: Floats = np.exp(self._sharpness * (np.minimum(self._used, _MOST_LOAD) - 1))
        return result

    def _rise(self, size: Floats) -> Floats:
        """``exp(a s) - 1``."""
        result: Floats = np.expm1(self._sharpness * np.minimum(size, _MOST_LOAD))
        return result

    def _gains(self) -> Floats:
        """About what each table would add to the measure if it changed in the best way: ``[A]``."""
        weight = self._weight()
        leaving = self._leaving(weight)
        asked = distinct(self._alike[np.argsort(leaving, kind="stable")[:_MOST_ASKED]])
        menu = self._menu_of(asked)
        best = np.full(len(self._space.options.tables), np.inf)
        np.minimum.at(best, self._space.options.table[menu.options], self._entering(menu, weight))
        result: Floats = leaving + best[self._alike]
        return result

    def _menu_of(self, tables: Ints) -> Menu:
        """The menu of some distinct tables together."""
        key = tables.tobytes()
        if key not in self._joint:
            of = self._space.options.table
            asked = np.zeros(len(self._space.options.tables), dtype=bool)
            asked[tables] = True
            self._joint = {key: Menu.of(self._space, np.flatnonzero(self._allowed & asked[of]), self._most)}
        return self._joint[key]

    def _leaving(self, weight: Floats) -> Floats:
        """Compute the change of the measure if each table were taken out: ``[A]``."""
        numbers: dict[int, int] = {}
        places = [numbers.setdefault(id(place), len(numbers)) for place in self._places]
        first = dict(zip(places, self._places, strict=True))
        each = [first[index] for index in range(len(numbers))]
        touched = np.concatenate([place.touched for place in each])
        taken = np.concatenate([place.taken for place in each])
        changes = (weight[touched] * np.expm1(-self._sharpness * taken)).sum(axis=1)
        result: Floats = np.zeros(len(each))
        np.add.at(result, np.repeat(np.arange(len(each)), [len(place.touched) for place in each]), changes)
        return result[places]

    def _entering(self, menu: Menu, weight: Floats) -> Floats:
        """Compute the change of the measure by each option at its best places: ``[O']``."""
        enter = self._rise(menu.size) @ weight.T
        self._watch.spend(_CALL_US + _CELL_US * enter.size)
        value = np.zeros(len(menu.count))
        fixed = np.flatnonzero(menu.start != FREE)
        if len(fixed):
            upto = np.cumsum(enter[fixed], axis=1)
            last, first = menu.start[fixed] + menu.count[fixed] - 1, menu.start[fixed]
            rows = np.arange(len(fixed))
            value[fixed] = upto[rows, last] - np.where(first > 0, upto[rows, first - 1], 0.0)
        alone = np.flatnonzero((menu.start == FREE) & (menu.gang == NO_GANG))
        if len(alone):
            value[alone] = _least(enter[alone], menu.count[alone])
        total: Floats = np.zeros(len(menu.options))
        np.add.at(total, menu.run_option, value)
        gangs = np.flatnonzero((menu.start == FREE) & (menu.gang != NO_GANG))
        if len(gangs):
            self._add_gangs(menu, gangs, enter, total)
        return total

    def _add_gangs(self, menu: Menu, runs: Ints, enter: Floats, total: Floats) -> None:
        by_host = self._by_host(menu, runs, enter)
        gang, first = np.unique(menu.gang[runs], return_index=True)
        at = np.searchsorted(gang, menu.gang[runs])
        value = np.zeros((len(gang), by_host.shape[1]))
        np.add.at(value, at, by_host)
        np.add.at(total, menu.run_option[runs[first]], value.min(axis=1))

    def _by_host(self, menu: Menu, runs: Ints, enter: Floats) -> Floats:
        """Compute the change of the measure by runs of gangs on each host: ``[len(runs), H]``."""
        size, count, local = self.local_size, menu.count[runs], menu.local[runs]
        hosts = enter[runs].reshape(len(runs), -1, size)
        upto = np.cumsum(np.where((local == FREE)[:, None, None], np.sort(hosts, axis=2), hosts), axis=2)
        start = np.where(local == FREE, 0, local)
        last = np.minimum(start + count, size) - 1
        rows = np.arange(len(runs))
        value: Floats = upto[rows, :, last]
        before = upto[rows, :, np.maximum(start - 1, 0)]
        return value - np.where((start > 0)[:, None], before, 0.0)

    # -- changing one table ----------------------------------------------------------------------------------

    def _change(self, table: int, least: float) -> bool:
        """Take a table out and put it back in the best way; whether that is another and a better one."""
        old = self._places[table]
        self._used[old.touched] -= old.taken
        weight = self._weight()
        before = float((weight[old.touched] * self._rise(old.taken)).sum())
        menu = self._menu(int(self._alike[table]))
        value = self._entering(menu, weight)
        best = int(np.argmin(value))
        if value[best] < before - least:
            new = self._placed(menu, best, weight)
            after = float((weight[new.touched] * self._rise(new.taken)).sum())
            if after < before - least:
                self._used[new.touched] += new.taken
                self._places[table], self.proposal[table] = new, menu.options[best]
                return True
        self._used[old.touched] += old.taken
        return False

    def _menu(self, table: int) -> Menu:
        if table not in self._menus:
            mine = np.array(self._space.options.of_table(table))
            self._menus[table] = Menu.of(self._space, mine[self._allowed[mine]], self._most)
        return self._menus[table]

    def _placed(self, menu: Menu, option: int, weight: Floats) -> Places:
        """The best places of an option's shards, run after run."""
        enter = self._rise(menu.size) @ weight.T
        used = np.zeros_like(self._used)
        host_of = dict[int, int]()
        ranks = []
        for run in np.flatnonzero(menu.run_option == option).tolist():
            count, start, gang = int(menu.count[run]), int(menu.start[run]), int(menu.gang[run])
            if start != FREE:
                used[start : start + count] += menu.size[run]
                continue
            if gang == NO_GANG:
                where = _cheapest(enter[run], count)
            else:
                if gang not in host_of:
                    members = np.flatnonzero(menu.gang == gang)
                    host_of[gang] = int(np.argmin(self._by_host(menu, members, enter).sum(axis=0)))
                where = self._in_host(menu, run, host_of[gang], enter[run])
            np.add.at(used, where, menu.size[run])
            ranks.append(where)
        touched = np.flatnonzero(used.any(axis=1))
        return Places(np.concatenate(ranks or [touched[:0]]), touched, used[touched])

    def _in_host(self, menu: Menu, run: int, host: int, enter: Floats) -> Ints:
        first, count, local = host * self.local_size, int(menu.count[run]), int(menu.local[run])
        if local != FREE:
            return first + local + np.arange(count)
        return first + _cheapest(enter[first : first + self.local_size], count)


def descended(start: Assignment, effort: Effort) -> Assignment:
    """A plan improved towards its limit of time by :class:`Descent`.

    Args:
        start: every shard in some rank, limits or not.
        effort: amount of work that may be done.
    """
    catalogue = start.catalogue
    descent = Descent(start.space, catalogue.is_efficient, start.bins.limit_ms, effort, catalogue.watch)
    descent.begin(start.proposal, start.ranks_of_tables)
    descent.run()
    result = Assignment(catalogue, descent.proposal, start.bins.limit_ms)
    result.bins.place(np.concatenate(descent.ranks))
    return result


def _least(enter: Floats, count: Ints) -> Floats:
    """The sum of as many of the least of each row ``[K, W]`` as ``count`` says."""
    if (count == 1).all():
        least: Floats = enter.min(axis=1)
        return least
    upto = np.cumsum(np.sort(enter, axis=1), axis=1)
    whole, rest = np.divmod(count, enter.shape[1])
    rows = np.arange(len(enter))
    some = np.where(rest > 0, upto[rows, np.maximum(rest - 1, 0)], 0.0)
    result: Floats = whole * upto[:, -1] + some
    return result


def _cheapest(enter: Floats, count: int) -> Ints:
    """The ranks where ``count`` equal shards add least, as evenly as can be."""
    if count == 1:
        return np.array([int(np.argmin(enter))])
    order = np.argsort(enter, kind="stable")
    return order[np.arange(count) % len(order)]
