"""A few bins packed anew exactly, again and again: little room in many of them comes together where it is short.

Where hardly any room is left, no move, swap or exchange among two or three bins goes in, but most groups of four or
five have several packings. These are found by completion of bins (Korf 2003): the sets of items that fill a bin but for
what the whole group has too much of are few, and are listed from the sums of all sets (Horowitz and Sahni 1974);
bin after bin takes such a set that has the largest item left. Of the packings of a group, that with the most uneven
room is taken (the measure of Falkenauer 1996): room that is gathered in one bin is of use to another.

Legend: N items of a group, G bins of it, D dimensions, X sets of items.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from attrs import define, field

from shardwright.planning.options import Floats, Ints
from shardwright_plugins.packing.bins import Bins
from shardwright_plugins.packing.limits import SLACK, excess

# Items of a group, and its bins, at most; sets of items that are listed.
_FEWEST_ITEMS, _MOST_ITEMS, _MOST_BINS, _MOST_SETS = 14, 30, 12, 60_000
# Nodes of the search for packings of a group, and packings among which one is chosen.
_MOST_NODES, _MOST_PACKINGS = 150, 8
# How often a group is about a bin that is over its limit; what uneven room is worth against what is over.
_ABOUT_WORST, _GATHER, _ROUNDING = 0.7, 1e-2, 1e-12
# Sets that leave little free come first, but for so much of what the group has free, by chance.
_CHANCE = 0.3


def regroup(bins: Bins, rounds: int, *, seed: int = 0) -> bool:
    """Pack groups of bins anew as long as something is over the limits; whether nothing is any more.

    Args:
        bins: every item is in one.
        rounds: groups at most.
        seed: of the generator that draws the groups; one seed gives one answer.
    """
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        over = bins.over()
        if over.max() <= 0:
            return True
        if bins.effort.is_spent or len(bins.used) < 2:
            return False
        bins.effort.left -= 1
        _regroup(bins, over, random)
    return bool(bins.over().max() <= 0)


def _regroup(bins: Bins, over: Floats, random: np.random.Generator) -> None:
    group, items = _group(bins, over, random)
    if len(items) < 2:
        return
    inside = bins.bin[items]
    rest = bins.used[group].copy()
    for place, where in enumerate(group.tolist()):
        rest[place] -= bins.size[items[inside == where]].sum(axis=0)
    limit = bins.limit[group] * (1 + SLACK)
    over_now = float(over[group].sum())
    # What is over may be so in another bin afterwards, by no more.
    packings = Packings(bins.size[items], limit + over_now * bins.limit[group] - rest).found(random)
    best, chosen = np.inf, None
    for packing in islice(packings, _MOST_PACKINGS):
        used = rest.copy()
        np.add.at(used, packing, bins.size[items])
        left = float(excess(used, bins.limit[group]).sum())
        uneven = float(((1 - used / limit).max(axis=1) ** 2).sum())
        worth = left - _GATHER * uneven * random.random()
        if left <= over_now + _ROUNDING and worth < best:
            best, chosen = worth, packing
    if chosen is None:
        return
    for item, place in zip(items.tolist(), chosen.tolist(), strict=True):
        if bins.bin[item] != group[place]:
            bins.take(item)
            bins.put(item, int(group[place]))


def _group(bins: Bins, over: Floats, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Bins by chance, mostly one that is over among them, and their items that may move."""
    num = len(over)
    order = random.permutation(num)
    if random.random() < _ABOUT_WORST:
        worst = int(random.choice(num, p=over / over.sum()))
        order = np.append(worst, order[order != worst])
    most = int(random.integers(_FEWEST_ITEMS, _MOST_ITEMS + 1))
    group: list[int] = []
    items: list[Ints] = []
    for where in order[:_MOST_BINS].tolist():
        here = random.permutation(np.flatnonzero(bins.alone & (bins.bin == where)))[:most]
        most -= len(here)
        group.append(where)
        items.append(here)
        if not most:
            break
    return np.array(group, dtype=np.int64), np.concatenate(items)


@define(eq=False)
class Packings:
    """The packings of items into bins.

    Args:
        size: of each item: ``[N, D]``.
        room: of each bin: ``[G, D]``.
        most_nodes: of the search, at most.
    """

    size: Floats
    room: Floats
    most_nodes: int = _MOST_NODES
    _order: Ints = field(init=False)
    _scarce: int = field(init=False)
    _nodes: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        need, have = self.size.sum(axis=0), np.maximum(self.room.sum(axis=0), 1e-30)
        self._scarce = int(np.argmax(need / have))
        # The largest item is the first bit.
        self._order = np.argsort(-self.size[:, self._scarce], kind="stable")

    def found(self, random: np.random.Generator) -> Iterator[Ints]:
        """The bin of each item: ``[N]``, for one packing after the other."""
        spare = self.room.sum(axis=0) - self.size.sum(axis=0)
        if (spare < 0).any() or (self.room < 0).any():
            return
        known = _sets(self.size[self._order, self._scarce], float(self.room[:, self._scarce].max()))
        if known is None:
            return
        sets = [
            self._filling(*known, place, float(spare[self._scarce]), random)
            for place in range(len(self.room))
        ]
        everything = (1 << len(self.size)) - 1
        for chosen in self._packed(everything, list(range(len(self.room))), sets):
            packing = np.zeros(len(self.size), dtype=np.int64)
            for place, members in chosen:
                packing[self._order[(members >> np.arange(len(self.size))) & 1 == 1]] = place
            yield packing

    def _filling(
        self, sets: Ints, sums: Floats, place: int, spare: float, random: np.random.Generator
    ) -> Ints:
        """The sets that fill a bin but for what there is too much of, the fullest first but for chance: ``[X]``."""
        room = self.room[place, self._scarce]
        fills = (sums <= room) & (sums >= room * (1 - SLACK) - spare)
        sets, free = sets[fills], room - sums[fills]
        bits = (sets[:, None] >> np.arange(len(self.size))) & 1
        fits = (bits @ self.size[self._order] <= self.room[place]).all(axis=1)
        sets, free = sets[fits], free[fits]
        order: Ints = sets[np.argsort(free + random.random(len(free)) * _CHANCE * spare)]
        return order

    def _packed(self, left: int, places: list[int], sets: list[Ints]) -> Iterator[list[tuple[int, int]]]:
        """Sets for bins ``places`` that hold all items of ``left`` together."""
        self._nodes += 1
        if not left:
            yield []
            return
        first = left & -left
        for index in self._different(places):
            place, others = places[index], places[:index] + places[index + 1 :]
            mine = sets[index][sets[index] & first != 0]
            if len(others) == 1:
                ends = mine[np.isin(left ^ mine, sets[1 - index])]
                yield from ([(place, one), (others[0], left ^ one)] for one in ends.tolist())
                continue
            for one in mine.tolist():
                if self._nodes > self.most_nodes:
                    return
                further = [each[each & one == 0] for number, each in enumerate(sets) if number != index]
                for chosen in self._packed(left & ~one, others, further):
                    yield [(place, one), *chosen]

    def _different(self, places: list[int]) -> list[int]:
        """The positions of bins, of those with equal room the first."""
        seen = {self.room[place].tobytes(): index for index, place in reversed(list(enumerate(places)))}
        return sorted(seen.values())


def _sets(size: Floats, room: float) -> tuple[Ints, Floats] | None:
    """The sets of items that fit into so much room, and what they take; ``None`` if there are too many.

    Bit ``i`` of a set is item ``i``: ``[X]`` both.
    """
    sets, sums = np.zeros(1, dtype=np.int64), np.zeros(1)
    for item, one in enumerate(size.tolist()):
        fits = sums + one <= room
        sets = np.concatenate([sets, sets[fits] | (1 << item)])
        sums = np.concatenate([sums, sums[fits] + one])
        if len(sets) > _MOST_SETS:
            return None
    return sets, sums
