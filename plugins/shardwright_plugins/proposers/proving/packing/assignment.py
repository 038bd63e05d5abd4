"""Options of tables together with the ranks of their shards: repaired by moves and swaps, or rebuilt table by table.

Legend: A tables, O options, N items (shards that their layout gives no rank), W ranks, C classes of ranks, D dimensions
(time by class, then memory tiers).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cached_property

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import FREE, NO_GANG, Bools, Floats, Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.placement import fixed_loads, propose
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.dominance import efficient_options
from shardwright_plugins.proposers.proving.packing.bins import (
    SLACK,
    Bins,
    excess,
    gang_bins,
    largest,
)

# Microseconds (measured) of a look at a table's options, of one that is placed shard after shard, and of a number.
_TABLE_US, _OPTION_US, _CELL_US = 100.0, 200.0, 0.02


@frozen(eq=False)
class Pieces:
    """The shards of an option.

    Args:
        fixed: load of the shards that have a rank by their layout: ``[W, D]``; ``None`` if there are none.
        size: load of each of the others, ``[K, D]``.
        gang: ``[K]``, numbered within the option.
        local: the rank inside the host that it must have: ``[K]``.
        kind: the run of equal shards that it is of: ``[K]``.
    """

    fixed: Floats | None
    size: Floats
    gang: Ints
    local: Ints
    kind: Ints


@frozen(eq=False)
class Menu:
    """The options of a table that are worth a look, by what placing them takes.

    Args:
        singles: those of one shard that may go anywhere: ``[K]``.
        single_size: ``[K, D]``.
        spread: those of which all shards have a rank by their layout: ``[J]``.
        spread_size: load of these on each rank, ``[J, W, D]``.
        others: the rest.
    """

    singles: Ints
    single_size: Floats
    spread: Ints
    spread_size: Floats
    others: tuple[int, ...]


class Catalogue:
    """The shards of the options of a space, and which options are worth a look."""

    def __init__(self, space: SearchSpace, watch: Watch) -> None:
        self.space, self.watch = space, watch
        self.world_size, self.num_classes = len(space.capacity_bytes), space.class_ms.shape[1]
        self.local_world_size = space.topology.local_world_size
        self.capacity: Floats = space.capacity_bytes.astype(np.float64)
        self._pieces: dict[int, Pieces] = {}
        self._menus: dict[int, Menu] = {}

    def pieces(self, option: int) -> Pieces:
        """The shards of an option."""
        if option not in self._pieces:
            self._pieces[option] = self._make(option)
        return self._pieces[option]

    def _make(self, option: int) -> Pieces:
        space, options = self.space, self.space.options
        span = options.shards_of(option)
        runs = np.arange(span.start, span.stop)
        is_fixed = options.rank[runs] != FREE
        fixed = None
        if is_fixed.any():
            loads, used = fixed_loads(space, runs[is_fixed])
            fixed = np.hstack([np.repeat(loads[:, None], self.num_classes, axis=1), used])
        rest = runs[~is_fixed]
        count = options.count[rest]
        shard = np.repeat(rest, count)
        place = np.concatenate([np.arange(size) for size in count.tolist()] or [np.empty(0, dtype=np.int64)])
        local = options.local_rank[shard]
        return Pieces(
            fixed=fixed,
            size=np.hstack([space.class_ms[shard], space.memory_bytes[shard]]),
            gang=options.gang[shard],
            local=np.where(local == FREE, FREE, local + place),
            kind=shard,
        )

    def menu(self, table: int) -> Menu:
        """The efficient options of a distinct table."""
        if table not in self._menus:
            self._menus[table] = self._make_menu(table)
        return self._menus[table]

    def _make_menu(self, table: int) -> Menu:
        mine = [option for option in self.space.options.of_table(table) if self.is_efficient[option]]
        pieces = [self.pieces(option) for option in mine]
        singles = [
            i for i, p in enumerate(pieces) if p.fixed is None and len(p.size) == 1 and p.gang[0] == NO_GANG
        ]
        spread = [i for i, p in enumerate(pieces) if p.fixed is not None and not len(p.size)]
        rest = set(range(len(mine))) - {*singles, *spread}
        dims = self.num_classes + self.capacity.shape[1]
        return Menu(
            singles=np.array([mine[i] for i in singles], dtype=np.int64),
            single_size=np.array([pieces[i].size[0] for i in singles]).reshape(-1, dims),
            spread=np.array([mine[i] for i in spread], dtype=np.int64),
            spread_size=np.array([pieces[i].fixed for i in spread]).reshape(-1, self.world_size, dims),
            others=tuple(mine[i] for i in sorted(rest)),
        )

    @cached_property
    def is_efficient(self) -> Bools:
        """True for options that no other of their table equals in every respect and beats in one: ``[O]``."""
        return efficient_options(self.space)


class Assignment:
    """One option for each table, and ranks for all shards.

    Args:
        catalogue: catalogue of the space.
        proposal: ``[A]``.
        limit_ms: the time that no rank should exceed.
    """

    def __init__(self, catalogue: Catalogue, proposal: Ints, limit_ms: float) -> None:
        self.catalogue, self.space = catalogue, catalogue.space
        self.proposal = proposal.copy()
        shards = propose(self.space, proposal)
        self.bins = Bins.of(shards, limit_ms, shards.shard, catalogue.watch)
        starts = np.searchsorted(shards.table, np.arange(len(proposal) + 1)).tolist()
        self._items = [list(range(starts[table], starts[table + 1])) for table in range(len(proposal))]
        self._next_gang = int(shards.gang.max(initial=-1)) + 1

    @property
    def value_ms(self) -> float:
        """The largest rank's time; infinite if memory is exceeded."""
        fits = (self.bins.memory_bytes <= self.catalogue.capacity * (1 + 1e-12)).all()
        return float(self.bins.time_ms.max()) if fits else np.inf

    @property
    def excess(self) -> float:
        """Excess of all ranks together over their limits, in parts of these."""
        return float(self.bins.over().sum())

    @property
    def ranks(self) -> Ints:
        """The rank of every item, in the order of tables and shards: ``[N]``."""
        return self.bins.bin[[item for items in self._items for item in items]]

    @property
    def ranks_of_tables(self) -> list[Ints]:
        """The ranks of each table's items, in the order of its shards."""
        return [self.bins.bin[items] for items in self._items]

    def copy(self) -> Assignment:
        """Copy the options and ranks."""
        twin = copy(self)
        twin.bins, twin.proposal, twin._items = self.bins.copy(), self.proposal.copy(), list(self._items)
        return twin

    def fill(self) -> None:
        """Put every shard somewhere, the largest first."""
        most = largest(self.bins.limit, self.bins.num_classes)
        self.bins.fill((self.bins.size / most).max(axis=1))

    def rebuild(self, rounds: int, price: Floats, *, seed: int = 0) -> bool:
        """Take a few tables out and put them back, each the best way, as long as nothing is lost.

        Large neighbourhood search (Shaw 1998): tables of the worst rank and of others, chosen by a generator with a
        fixed seed.

        Args:
            rounds: largest number of rounds.
            price: price of each option, to choose among ways that leave equally much over: ``[O]``.
            seed: seed of the generator.
        """
        random = np.random.default_rng(seed)
        for _ in range(rounds):
            over = self.bins.over()
            now = float(over.sum())
            if now <= 0:
                return True
            if self.bins.watch.is_over:
                return False
            saved = (self.bins, self.proposal, self._items)
            self.bins, self.proposal, self._items = self.bins.copy(), self.proposal.copy(), list(self._items)
            tables = self._some_tables(int(np.argmax(over)), random)
            if random.integers(2):
                largest = self.space.largest_bytes[self.proposal[tables]].max(axis=1)
                tables = [tables[index] for index in np.argsort(-largest, kind="stable").tolist()]
            self._reinsert(tables, price)
            self.bins.repair(20)
            if float(self.bins.over().sum()) > now + 1e-12:
                self.bins, self.proposal, self._items = saved
        return bool(self.bins.over().max() <= 0)

    def _some_tables(self, worst: int, random: np.random.Generator) -> list[int]:
        """Some tables of the worst rank, of another, and of any."""
        other = int(random.integers(self.catalogue.world_size))
        on_worst = self._with_items_on(worst)
        tables = list(random.permutation(on_worst)[:3])
        tables += list(random.permutation(self._with_items_on(other))[: int(random.integers(1, 4))])
        tables += list(random.integers(len(self.proposal), size=int(random.integers(1, 5))))
        return list(dict.fromkeys(int(table) for table in random.permutation(tables)))

    def _with_items_on(self, rank: int) -> list[int]:
        here = set(np.flatnonzero(self.bins.bin == rank).tolist())
        return [table for table, items in enumerate(self._items) if here.intersection(items)]

    def _reinsert(self, tables: list[int], price: Floats) -> None:
        for table in tables:
            self._take_out(table)
        for table in tables:
            ways = self._ways(table, self.bins.used)
            best = min(ways, key=lambda way: (round(way[1], 6), price[way[0]]), default=None)
            if best is None:  # every other option is out of the question
                option = int(self.proposal[table])
                bins = self._placed(self.bins.used, self.catalogue.pieces(option))[1]
            else:
                option, _, bins = best
            self._put_in(table, option, bins)

    # -- ways to place a table ------------------------------------------------------------------------------

    def _ways(self, table: int, rest: Floats) -> Iterator[tuple[int, float, list[int]]]:
        """Yield each option of a table that is out, with what it would leave over the limits and its shards' places."""
        menu = self.catalogue.menu(int(self.space.options.distinct_table[table]))
        limit = self.bins.limit
        cells = (len(menu.singles) + len(menu.spread) + len(menu.others)) * limit.size
        self.bins.watch.spend(_TABLE_US + _OPTION_US * len(menu.others) + _CELL_US * cells)
        over = excess(rest, limit)
        now = float(over.sum())
        if len(menu.singles):
            after = (rest[None] + menu.single_size[:, None]) / limit
            harm = np.maximum(after - (1 + SLACK), 0).sum(axis=2) - over
            where = (harm + 1e-6 * after.max(axis=2)).argmin(axis=1)
            rows = np.arange(len(where))
            yield from zip(
                menu.singles.tolist(),
                (now + harm[rows, where]).tolist(),
                where[:, None].tolist(),
                strict=True,
            )
        if len(menu.spread):
            left = excess(rest + menu.spread_size, limit).sum(axis=1)
            yield from (
                (option, value, []) for option, value in zip(menu.spread.tolist(), left.tolist(), strict=True)
            )
        for option in menu.others:
            if self.space.largest_cost_ms[option] <= self.bins.limit_ms:
                yield (option, *self._placed(rest, self.catalogue.pieces(option)))

    def _placed(self, rest: Floats, pieces: Pieces) -> tuple[float, list[int]]:
        limit = self.bins.limit
        used = rest.copy() if pieces.fixed is None else rest + pieces.fixed
        bins = [FREE] * len(pieces.size)
        for gang in dict.fromkeys(pieces.gang[pieces.gang != NO_GANG].tolist()):
            members = np.flatnonzero(pieces.gang == gang)
            chosen = gang_bins(
                used,
                limit,
                self.catalogue.num_classes,
                pieces.size[members],
                pieces.local[members],
                self.catalogue.local_world_size,
            )
            np.add.at(used, chosen, pieces.size[members])
            for member, where in zip(members.tolist(), chosen, strict=True):
                bins[member] = where
        for piece in np.flatnonzero(pieces.gang == NO_GANG).tolist():
            after = used + pieces.size[piece]
            harm = excess(after, limit) - excess(used, limit)
            where = int(np.lexsort(((after / limit).max(axis=1), harm))[0])
            used[where] = after[where]
            bins[piece] = where
        return float(excess(used, limit).sum()), bins

    def _take_out(self, table: int) -> None:
        pieces = self.catalogue.pieces(int(self.proposal[table]))
        self.bins.remove(self._items[table])
        self._items[table] = []
        if pieces.fixed is not None:
            self.bins.used -= pieces.fixed

    def _put_in(self, table: int, option: int, bins: list[int]) -> None:
        pieces = self.catalogue.pieces(option)
        if pieces.fixed is not None:
            self.bins.used += pieces.fixed
        _, gang = np.unique(pieces.gang, return_inverse=True)
        numbered = np.where(pieces.gang == NO_GANG, NO_GANG, gang + self._next_gang)
        self._next_gang += len(pieces.gang) + 1
        self._items[table] = list(self.bins.add(pieces.size, numbered, pieces.local, pieces.kind, bins))
        self.proposal[table] = option
