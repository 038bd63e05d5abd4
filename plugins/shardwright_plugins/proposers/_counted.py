"""Plans of many tables that are alike over a few ranks: options by number, shards by size, each shared out exactly.

Where time alone is short, and shards are of few sizes, what counts is how many tables of each kind take which option,
and how many shards of each size go to each rank. For a choice of numbers the second is found exactly
(:mod:`~shardwright_plugins.proposers._counting`) in less than a millisecond. So many choices are tried for a time:
that of the bound's proof, and those where a few tables take another option, which costs little more and may leave
shards of sizes that go together better.

Legend: A tables, T distinct tables, O options, W ranks of hosts of L, K sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from attrs import define, field, frozen

from shardwright.planning.distinct import distinct
from shardwright.planning.options import FREE, NO_GANG, Floats, Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.proposers._choices import LADDER
from shardwright_plugins.proposers._counting import shared_out

# Shards are shared out by counting where so few kinds of tables are all there are, over so few ranks.
_FEW_KINDS, _FEW_RANKS = 16, 32
# More sizes are not shared out.
_MOST_SIZES = 12
# Times tried from the bound up, those tried between the best plan and the bound, and how near they come to it.
_RUNGS, _NARROWINGS, _NARROW = 4, 3, 1e-3
# With more tables than these, they need not come as near.
_FEW_TABLES, _NEAR = 64, 1.5e-3
_CASES = 12
# Choices tried for a time, and those tried thoroughly; tables of one kind that take another option in one, at most.
_MOST_CHOICES, _MOST_THOROUGH, _MOST_CHANGED = 40, 16, 8
# Ways to put gangs on hosts; plans that exceed memory, and the steps in which one is repaired.
_MOST_WAYS, _MOST_MISFITS, _REPAIR_STEPS = 16, 6, 60
# Sizes that differ by less are one.
_ONE_SIZE = 1e-9


@frozen(eq=False)
class Numbers:
    """A choice of options, by number, and what it takes.

    Args:
        tables: how many tables take each option: ``[O]``.
        total_ms: of all their shards together.
    """

    tables: Ints
    total_ms: float


@frozen(eq=False)
class Lump:
    """The time of the shards of an option.

    Args:
        fixed: on each rank, of those that have one by their layout: ``[W]``; ``None`` if there are none.
        gang: of those that go to one host, on each of its ranks: ``[L]``; ``None`` if there are none.
        alone: of each of the others.
    """

    fixed: Floats | None
    gang: Floats | None
    alone: list[float]


@frozen(eq=False)
class Lumps:
    """What a choice has to place.

    Args:
        load: what lies on each rank anyway, gangs among it: ``[W]``.
        hosts: the host of each gang, option after option.
        size: of the other shards, falling: ``[K]``.
        count: how many there are of each: ``[K]``.
    """

    load: Floats
    hosts: dict[int, list[int]]
    size: Floats
    count: Ints


@define(eq=False)
class Counted:
    """The search for such plans.

    Args:
        catalogue: of the space.
    """

    catalogue: Catalogue
    _known: dict[int, Lump | None] = field(factory=dict)

    @property
    def space(self) -> SearchSpace:
        """Options and costs."""
        return self.catalogue.space

    def plan(self) -> Assignment | None:
        """A plan near the bound; ``None`` if shards are of too many sizes, or none is found within memory."""
        found, low = None, self.space.prover.bound_ms
        near = _NARROW if len(self.space.options.all_tables) <= _FEW_TABLES else _NEAR
        for limit in self._rungs():
            found = self._within(limit, is_thorough=True)
            if found is not None or self.space.watch.is_over:
                break
            low = limit
        for _ in range(_NARROWINGS):
            low = max(low, self.space.prover.bound_ms)
            if found is None or found.value_ms <= low * (1 + near) or self.space.watch.is_over:
                break
            limit = low + (found.value_ms - low) / 2
            better = self._within(limit)
            low = limit if better is None else low
            found = better or found
        return found

    def _rungs(self) -> Iterator[float]:
        """Times from the bound up; after one that was refuted, the next is begun half way."""
        for rung, part in enumerate(LADDER[:_RUNGS]):
            limit, low = self.space.bound.possible_ms * (1 + part), self.space.prover.bound_ms
            if rung and low > self.space.bound.possible_ms:
                yield (low + limit) / 2
            yield limit

    def _within(self, limit_ms: float, *, is_thorough: bool = False) -> Assignment | None:
        """A plan within a time.

        Args:
            limit_ms: the time.
            is_thorough: whether larger shards are put in several ways, for the leanest choices.
        """
        misfits, choices = 0, list(self._choices(limit_ms))
        tries = [(numbers, False) for numbers in choices]
        if is_thorough:
            tries += [(numbers, True) for numbers in choices[:_MOST_THOROUGH]]
        for numbers, thorough in tries:
            if self.space.watch.is_over:
                return None
            for lumps in self._lumps(numbers):
                shares = shared_out(lumps.load, lumps.size, lumps.count, limit_ms, is_thorough=thorough)
                if shares is None:
                    continue
                found = self._placed(numbers, lumps, shares, limit_ms)
                if found.repair(_REPAIR_STEPS, changes=0):
                    return found
                misfits += 1
                if misfits == _MOST_MISFITS:
                    return None
        return None

    # -- choices ------------------------------------------------------------------------------------------------

    def _choices(self, limit_ms: float) -> Iterator[Numbers]:
        """Choices of options whose shards take no more than all ranks have; the leanest first."""
        cases = self.space.prover.refute(limit_ms, max_cases=_CASES)
        if cases.possible is None:
            return
        whole = self.space.bound.problem.maximise(limit_ms).proposal()
        bases = [self._numbers(choice) for choice in (cases.possible, whole) if choice is not None]
        if np.array_equal(bases[0].tables, bases[-1].tables):
            bases = bases[:1]
        found = [*bases, *(other for base in bases for other in self._changed(base, limit_ms))]
        most = limit_ms * self.catalogue.world_size
        found = [numbers for numbers in found if numbers.total_ms <= most]
        # What takes the same time in all is the same for this, whichever table it is.
        each = {round(numbers.total_ms / most, 9): numbers for numbers in reversed(found)}
        yield from sorted(each.values(), key=lambda numbers: numbers.total_ms)[:_MOST_CHOICES]

    def _numbers(self, proposal: Ints) -> Numbers:
        tables = np.bincount(proposal, minlength=self.space.options.num_options)
        return Numbers(tables, float(tables @ self.space.total_cost_ms))

    def _changed(self, base: Numbers, limit_ms: float) -> Iterator[Numbers]:
        """The same but for a few tables of one kind."""
        total, of = self.space.total_cost_ms, self.space.options.table
        usable = self.catalogue.is_efficient & (self.space.largest_cost_ms <= limit_ms)
        free = limit_ms * self.catalogue.world_size - base.total_ms
        for option in np.flatnonzero(base.tables).tolist():
            others = np.flatnonzero(usable & (of == of[option]))
            for other in others[others != option].tolist():
                more = float(total[other] - total[option])
                for number in range(1, min(int(base.tables[option]), _MOST_CHANGED) + 1):
                    if more * number <= free:
                        tables = base.tables.copy()
                        tables[option] -= number
                        tables[other] += number
                        yield Numbers(tables, base.total_ms + more * number)

    # -- what there is to place -----------------------------------------------------------------------------------

    def _lumps(self, numbers: Numbers) -> Iterator[Lumps]:
        """What a choice has to place, gangs in several ways; none if sizes are many, or gangs not of whole hosts."""
        load = np.zeros(self.catalogue.world_size)
        gangs: list[tuple[int, Floats]] = []
        sizes, counts = [], []
        for option in np.flatnonzero(numbers.tables).tolist():
            lump, tables = self._lump(option), int(numbers.tables[option])
            if lump is None:
                return
            if lump.fixed is not None:
                load = load + tables * lump.fixed
            if lump.gang is not None:
                gangs += [(option, lump.gang)] * tables
            sizes += lump.alone
            counts += [tables] * len(lump.alone)
        size, count = _merged(np.array(sizes), np.array(counts, dtype=np.int64))
        if len(size) <= _MOST_SIZES:
            for hosts in self._ways_of(gangs):
                yield Lumps(*self._with_gangs(load, gangs, hosts), size, count)

    def _lump(self, option: int) -> Lump | None:
        """The time of the shards of an option; ``None`` where its gang is not one shard on each rank of a host."""
        if option not in self._known:
            pieces, local_size = self.catalogue.pieces(option), self.catalogue.local_world_size
            in_gang = pieces.gang != NO_GANG
            places = np.where(pieces.local == FREE, np.arange(len(in_gang)) % local_size, pieces.local)
            is_whole = (
                in_gang.all() and len(distinct(pieces.gang)) == 1 and len(distinct(places)) == local_size
            )
            lump = None
            if not in_gang.any() or (is_whole and len(places) == local_size):
                fixed = None if pieces.fixed is None else pieces.fixed[:, 0]
                gang = pieces.size[np.argsort(places), 0] if in_gang.any() else None
                lump = Lump(fixed, gang, pieces.size[~in_gang, 0].tolist())
            self._known[option] = lump
        return self._known[option]

    def _ways_of(self, gangs: list[tuple[int, Floats]]) -> Iterator[list[int] | None]:
        """Hosts for gangs, each way once as far as times go; ``None``: each on the host that has least to do."""
        yield None
        num_hosts = self.catalogue.world_size // self.catalogue.local_world_size
        if not 1 < num_hosts ** len(gangs) <= _MOST_WAYS:
            return
        seen = set[tuple[float, ...]]()
        for hosts in product(range(num_hosts), repeat=len(gangs)):
            sums = np.zeros(num_hosts)
            np.add.at(sums, list(hosts), [float(taken.sum()) for _, taken in gangs])
            key = tuple(np.sort(np.round(sums, 9)).tolist())
            if key not in seen:
                seen.add(key)
                yield list(hosts)

    def _with_gangs(
        self, load: Floats, gangs: list[tuple[int, Floats]], hosts: list[int] | None
    ) -> tuple[Floats, dict[int, list[int]]]:
        """Gangs on hosts that are given, or on those that have least to do, the longest first."""
        by_host, found = load.reshape(-1, self.catalogue.local_world_size).copy(), dict[int, list[int]]()
        order = sorted(range(len(gangs)), key=lambda index: -float(gangs[index][1].sum()))
        for index in order:
            option, taken = gangs[index]
            host = int(np.argmin(by_host.sum(axis=1))) if hosts is None else hosts[index]
            by_host[host] += taken
            found.setdefault(option, []).append(host)
        return by_host.reshape(-1), found

    # -- the plan -------------------------------------------------------------------------------------------------

    def _placed(self, numbers: Numbers, lumps: Lumps, shares: Ints, limit_ms: float) -> Assignment:
        """The plan of a choice: of the shards of a size, the largest go where most memory is left."""
        options = self.space.options
        proposal = np.zeros(len(options.alike), dtype=np.int64)
        for table in range(len(options.tables)):
            mine = np.array(options.of_table(table))
            proposal[options.alike == table] = np.repeat(mine, numbers.tables[mine])
        result = Assignment(self.catalogue, proposal, limit_ms)
        bins, local_size = result.bins, self.catalogue.local_world_size
        ranks = np.full(len(bins.bin), FREE)
        hosts = {option: list(of_option) for option, of_option in lumps.hosts.items()}
        for members in bins.members.values():
            option = int(options.option[bins.kind[members[0]]])
            local = bins.local[members]
            places = np.where(local == FREE, np.arange(local_size), local)
            ranks[members] = hosts[option].pop(0) * local_size + places
        self._seat(result, ranks, lumps, shares.copy())
        result.place(ranks)
        return result

    def _seat(self, plan: Assignment, ranks: Ints, lumps: Lumps, left: Ints) -> None:
        """Ranks for the shards alone, of which so many of each size go to each."""
        bins = plan.bins
        used = bins.used[:, 1:] / bins.limit[:, 1:]
        gangs = np.flatnonzero(ranks != FREE)
        np.add.at(used, ranks[gangs], bins.size[gangs, 1:] / bins.limit[ranks[gangs], 1:])
        part = bins.size[:, 1:] / bins.limit[:, 1:].max(axis=0)
        alone = np.flatnonzero(ranks == FREE)
        if not len(alone):
            return
        kind = np.abs(bins.size[alone, :1] - lumps.size).argmin(axis=1)
        order = np.argsort(-part[alone].max(axis=1), kind="stable")
        for item, size in zip(alone[order].tolist(), kind[order].tolist(), strict=True):
            fullest = (used + part[item]).max(axis=1)
            rank = int(np.argmin(np.where(left[:, size] > 0, fullest, np.inf)))
            ranks[item] = rank
            used[rank] += part[item]
            left[rank, size] -= 1


def _merged(size: Floats, count: Ints) -> tuple[Floats, Ints]:
    """Sizes, each once, falling, and how many shards there are of each; those that take no time are of the least."""
    order = np.argsort(-size, kind="stable")
    size, count = size[order], count[order]
    if not len(size):
        return size, count
    is_new = np.append(True, size[1:] < size[:-1] * (1 - _ONE_SIZE))
    first = np.flatnonzero(is_new)
    return np.maximum(size[first], 1e-30), np.add.reduceat(count, first)


def counted(catalogue: Catalogue) -> Assignment | None:
    """A plan by numbers of options and of shards, where many tables are alike over a few ranks; else ``None``.

    Args:
        catalogue: of the space.
    """
    options = catalogue.space.options
    is_small = len(options.tables) <= _FEW_KINDS and len(catalogue.space.capacity_bytes) <= _FEW_RANKS
    if not is_small or len(options.all_tables) < 2 * len(options.tables):
        return None
    return Counted(catalogue).plan()
