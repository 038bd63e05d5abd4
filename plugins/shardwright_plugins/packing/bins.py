"""Shards in ranks, each with a limit of time and of every memory tier: filling them, and repairing what is over.

Vector bin packing with a fixed number of bins: units are put longest first (Graham 1969) where the fullest dimension of
the rank stays least full, then moved and swapped as long as that takes away from what is over a limit.

Legend: N items, W bins (ranks), D dimensions (time first, then memory tiers), L ranks of a host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache

import numpy as np

from shardwright.planning.distinct import distinct
from shardwright.planning.options import FREE, NO_GANG, Bools, Floats, Ints
from shardwright_plugins.packing.limits import SLACK, Effort, excess, fullness, gang_bins

# Partners of a swap are looked for in so many of the emptiest ranks.
_PARTNERS = 48
# A repair ends when so many of the worst bins in a row cannot be relieved.
_MOST_STUCK = 16
# After every few steps, a repair ends that would not be through even at a multiple of its pace so far.
_PACE, _HOPE = 8, 1.5
# The items of two bins are shared out anew in so many ways at most.
_MOST_WAYS = 2048


class Bins:
    """Items in bins.

    Args:
        size: of each item, ``[N, D]``.
        used: what is in the bins before: ``[W, D]``.
        limit: ``[W, D]``.
        gang: items of one number go to one host; ``NO_GANG``: alone. ``[N]``.
        local: the bin of its host that an item of a gang must have, or ``FREE``: ``[N]``.
        bins_per_host: ``L``.
        kind: items of one number are equal: ``[N]``.
        effort: what repairs draw on; no end by default.
    """

    def __init__(
        self,
        size: Floats,
        used: Floats,
        limit: Floats,
        gang: Ints,
        local: Ints,
        bins_per_host: int,
        kind: Ints,
        effort: Effort | None = None,
    ) -> None:
        self.kind, self.effort = kind, effort or Effort()
        self.size, self.limit = size, np.maximum(limit, 1e-30)
        self.used = used.copy()
        self.gang, self.local, self.bins_per_host = gang, local, bins_per_host
        self.bin: Ints = np.full(len(size), FREE)
        self._alone = gang == NO_GANG
        self._members = _members(gang)
        self._is_settled = np.zeros(len(size), dtype=bool)

    @property
    def members(self) -> Mapping[int, Sequence[int]]:
        """The items of each gang."""
        return self._members

    # -- filling ---------------------------------------------------------------------------------------------

    def fill(self, weight: Floats) -> None:
        """Put every item that is in no bin somewhere, heaviest first, limits or not."""
        out = np.flatnonzero((self.bin == FREE) & ~self._is_settled)
        order = out[np.lexsort((out, self.kind[out], -weight[out]))]
        changes = np.flatnonzero(np.diff(self.kind[order])) + 1
        for run in np.split(order, changes):
            if not len(run):
                continue
            if self.gang[run[0]] != NO_GANG:
                for gang in dict.fromkeys(self.gang[run].tolist()):
                    if self.bin[self._members[gang][0]] == FREE:
                        self._put_gang(self._in_order(self._members[gang]))
            else:
                self._put_equal(run)

    def _in_order(self, unit: Sequence[int]) -> list[int]:
        """Those with a place in their host first, then the longest."""
        return sorted(unit, key=lambda item: (self.local[item] == FREE, -self.size[item, 0], item))

    def _put_equal(self, items: Ints) -> None:
        """Put equal items where one after the other, each in the emptiest bin with room, would come to lie."""
        count, size = len(items), self.size[items[0]]
        if count > 1:
            deep = min(count, 2 + 2 * -(-count // len(self.used)))
            levels = np.arange(1, deep + 1)
            room = (self.limit[:, 1:] * (1 + SLACK) - self.used[:, 1:]) / np.maximum(size[1:], 1e-30)
            after = (self.used[:, None] + levels[:, None] * size) / self.limit[:, None]
            load = fullness(after)
            load = np.where(levels <= room.min(axis=1, initial=np.inf)[:, None], load, np.inf)
            first = np.argsort(load, axis=None, kind="stable")[:count]
            first = first[np.isfinite(load.flat[first])]
            bins = first // deep
            self.bin[items[: len(bins)]] = bins
            self.used += np.bincount(bins, minlength=len(self.used))[:, None] * size
            items = items[len(bins) :]
        for item in items.tolist():
            self.put(item, self._best_bin(item))

    def _best_bin(self, item: int) -> int:
        """Where the fullest dimension is least full afterwards; within limits, if that can be."""
        after = (self.used + self.size[item]) / self.limit
        fullest = fullness(after)
        fits = after[:, 1:].max(axis=1, initial=0.0) <= 1 + SLACK
        return int(np.argmin(np.where(fits, fullest, 1e6 + fullest)))

    def _put_gang(self, unit: Sequence[int]) -> None:
        bins = self._gang_bins(unit)
        for item, where in zip(unit, bins, strict=True):
            self.put(item, where)

    def _gang_bins(self, unit: Sequence[int]) -> list[int]:
        """The bins of the host where a gang does least harm."""
        return gang_bins(self.used, self.limit, self.size[unit], self.local[unit], self.bins_per_host)

    def put(self, item: int, where: int) -> None:
        """Put an item that is in no bin into one."""
        self.bin[item] = where
        self.used[where] += self.size[item]

    def place(self, bins: Ints) -> None:
        """Put all items, which are in no bin, into these: ``[N]``."""
        self.bin = bins.copy()
        np.add.at(self.used, bins, self.size)

    def take(self, item: int) -> None:
        """Take an item out of its bin."""
        self.used[self.bin[item]] -= self.size[item]
        self.bin[item] = FREE

    def pin(self, item: int) -> None:
        """Leave an item where it is from now on, and its gang."""
        self._alone[item] = False
        self._is_settled[item] = True
        self._members.pop(int(self.gang[item]), None)

    def remove(self, items: Sequence[int]) -> None:
        """Take items out for good."""
        for item in items:
            self.take(item)
        self._is_settled[items] = True
        self._alone[items] = False
        for gang in distinct(self.gang[items]).tolist():
            self._members.pop(gang, None)

    def add(self, size: Floats, gang: Ints, local: Ints, kind: Ints, bins: Sequence[int]) -> range:
        """Put new items into bins; gangs bear numbers that no other item's has. Their numbers."""
        new = range(len(self.bin), len(self.bin) + len(size))
        self.size, self.kind = np.concatenate([self.size, size]), np.concatenate([self.kind, kind])
        self.gang, self.local = np.concatenate([self.gang, gang]), np.concatenate([self.local, local])
        self.bin = np.concatenate([self.bin, np.full(len(size), FREE)])
        self._alone = np.concatenate([self._alone, gang == NO_GANG])
        self._is_settled = np.concatenate([self._is_settled, np.zeros(len(size), dtype=bool)])
        for item, number in zip(new, gang.tolist(), strict=True):
            if number != NO_GANG:
                self._members.setdefault(number, []).append(item)
        for item, where in zip(new, bins, strict=True):
            self.put(item, where)
        return new

    @property
    def has_gangs(self) -> bool:
        """Whether some items must go to one host together."""
        return bool(self._members)

    @property
    def alone(self) -> Bools:
        """Which items may go to any bin, each on its own: ``[N]``."""
        return self._alone

    def movable_within(self, group: Ints) -> Bools:
        """Which items may go to any bin of a group, each on its own: ``[N]``.

        Where these are bins of one host, also items of gangs that need no certain one of them.
        """
        if (group // self.bins_per_host != group[0] // self.bins_per_host).any():
            return self._alone
        return self._alone | ((self.gang != NO_GANG) & (self.local == FREE) & ~self._is_settled)

    def copy(self) -> Bins:
        """The same items in the same bins."""
        twin = copy(self)
        twin.used, twin.bin = self.used.copy(), self.bin.copy()
        twin._alone, twin._is_settled, twin._members = (
            self._alone.copy(),
            self._is_settled.copy(),
            dict(self._members),
        )
        return twin

    # -- repair ----------------------------------------------------------------------------------------------

    def over(self) -> Floats:
        """By how much each bin is over its limits, in parts of them, all dimensions together: ``[W]``."""
        return excess(self.used, self.limit)

    def repair(self, steps: int, *, pairs: int = 0) -> bool:
        """Move and swap items as long as less is over the limits; whether nothing is over any more.

        Args:
            steps: at most.
            pairs: with so many other bins at most, the items of a bin that nothing else relieves are shared out anew.
        """
        stuck: set[int] = set()
        at_first = 0.0
        for step in range(steps):
            over = self.over()
            if over.max() <= 0:
                return True
            total = float(over.sum())
            at_first = at_first or total
            if self.effort.is_spent or len(stuck) >= _MOST_STUCK:
                return False
            if step % _PACE == _PACE - 1 and total > _HOPE * (at_first - total) / step * (steps - step):
                return False
            self.effort.left -= 1
            order = np.argsort(-over, kind="stable")
            worst = next(
                (int(b) for b in order[: len(stuck) + 1] if over[b] > 0 and int(b) not in stuck), None
            )
            if worst is None:
                return False
            if self._relieve(worst, over) or self._share_out(worst, over, pairs):
                stuck.clear()
            else:
                stuck.add(worst)
        return bool(self.over().max() <= 0)

    def _relieve(self, worst: int, over: Floats) -> bool:
        """Make the best move, swap or gang move out of a bin, if one is good."""
        here = self.bin == worst
        mine = np.flatnonzero(here & self._alone)
        best, act = -1e-12, None
        if len(mine):
            gain, item, where = self._best_move(mine, worst, over)
            if gain < best:
                best, act = gain, (item, where, -1)
            gain, item, other = self._best_swap(mine, worst, over)
            if gain < best:
                best, act = gain, (item, int(self.bin[other]) if other >= 0 else -1, other)
        if act is None or best > -0.3 * over[worst]:
            gain, gang = self._best_gang(distinct(self.gang[here & (self.gang != NO_GANG)]), over)
            if gain < best:
                self._move_gang(gang)
                return True
        if act is None:
            return False
        item, where, other = act
        self.take(item)
        if other >= 0:
            self.take(other)
            self.put(other, worst)
        self.put(item, where)
        return True

    def _share_out(self, worst: int, over: Floats, pairs: int) -> bool:
        """Share the items of a bin and of another out anew among the two, where that helps; whether it did."""
        fullest = (self.used / self.limit).max(axis=1)
        fullest[worst] = np.inf
        for other in np.argsort(fullest, kind="stable")[:pairs].tolist():
            self.effort.left -= 1
            if other != worst and self._share_between(worst, other, float(over[worst] + over[other])):
                return True
        return False

    def _share_between(self, first: int, second: int, over: float) -> bool:
        """The best of all ways to share the items of two bins out, equal ones taken as one kind."""
        items = np.flatnonzero(self._alone & ((self.bin == first) | (self.bin == second)))
        _, leader, kind, count = np.unique(
            self.kind[items], return_index=True, return_inverse=True, return_counts=True
        )
        chosen = _as_many_as(count, _MOST_WAYS)
        if not len(chosen):
            return False
        size = self.size[items[leader[chosen]]]
        here = np.bincount(kind[self.bin[items] == first], minlength=len(count))[chosen]
        ways = _ways(tuple((count[chosen] + 1).tolist()))
        moved = (ways - here) @ size
        left = excess(self.used[first] + moved, self.limit[first])
        left += excess(self.used[second] - moved, self.limit[second])
        best = int(np.argmin(left))
        if left[best] >= over - 1e-9:
            return False
        for number, index in enumerate(chosen.tolist()):
            mine = items[kind == index]
            for item in mine.tolist():
                self.take(item)
            for place, item in enumerate(mine.tolist()):
                self.put(item, first if place < ways[best, number] else second)
        return True

    def _best_move(self, mine: Ints, worst: int, over: Floats) -> tuple[float, int, int]:
        left = excess(self.used[worst] - self.size[mine], self.limit[worst]) - over[worst]
        there = excess(self.used[None] + self.size[mine][:, None], self.limit[None]) - over[None]
        gain = left[:, None] + there
        gain[:, worst] = np.inf
        index = int(np.argmin(gain))
        return float(gain.flat[index]), int(mine[index // gain.shape[1]]), index % gain.shape[1]

    def _best_swap(self, mine: Ints, worst: int, over: Floats) -> tuple[float, int, int]:
        others = self._partners(worst)
        if not len(others):
            return 0.0, -1, -1
        change = self.size[mine][:, None] - self.size[others][None]
        bins = self.bin[others]
        left = excess(self.used[worst] - change, self.limit[worst]) - over[worst]
        there = excess(self.used[bins][None] + change, self.limit[bins][None]) - over[bins][None]
        gain = left + there
        index = int(np.argmin(gain))
        return float(gain.flat[index]), int(mine[index // len(others)]), int(others[index % len(others)])

    def _partners(self, worst: int) -> Ints:
        """Items alone in other bins; of many bins, in the emptiest."""
        can = self._alone & (self.bin != worst) & (self.bin != FREE)
        if len(self.used) > _PARTNERS:
            fullest = (self.used / self.limit).max(axis=1)
            chosen = np.zeros(len(self.used), dtype=bool)
            chosen[np.argpartition(fullest, _PARTNERS)[:_PARTNERS]] = True
            can &= chosen[self.bin]
        return np.flatnonzero(can)

    def _best_gang(self, gangs: Ints, over: Floats) -> tuple[float, int]:
        best, found = 0.0, NO_GANG
        before = float(over.sum())
        # Of gangs that are alike and lie alike, the first one stands for all.
        alike = {
            (self.kind[unit].tobytes(), self.bin[unit].tobytes()): gang
            for gang, unit in ((gang, self._members[gang]) for gang in reversed(gangs.tolist()))
        }
        for gang in reversed(alike.values()):
            saved, bins = self.used.copy(), self.bin.copy()
            self._move_gang(gang)
            gain = float(self.over().sum()) - before
            self.used, self.bin = saved, bins
            if gain < best - 1e-12:
                best, found = gain, gang
        return best, found

    def change_gangs(self, random: np.random.Generator) -> None:
        """Move a gang, drawn by chance, to another host, or change it over with a gang there."""
        hosts = len(self.used) // self.bins_per_host
        gang, other = (int(g) for g in random.choice(list(self._members), 2))
        here, there = (self._host_of(gang), self._host_of(other))
        if here == there or random.integers(2):
            there, other = int(random.integers(hosts)), NO_GANG
        units = [(gang, there)] + ([(other, here)] if other != NO_GANG else [])
        for number, _ in units:
            for item in self._members[number]:
                self.take(item)
        for number, host in units:
            self._put_on_host(self._in_order(self._members[number]), host)

    def _host_of(self, gang: int) -> int:
        return int(self.bin[self._members[gang][0]]) // self.bins_per_host

    def _put_on_host(self, unit: Sequence[int], host: int) -> None:
        mine = slice(host * self.bins_per_host, (host + 1) * self.bins_per_host)
        places = gang_bins(
            self.used[mine], self.limit[mine], self.size[unit], self.local[unit], self.bins_per_host
        )
        for item, place in zip(unit, places, strict=True):
            self.put(item, mine.start + place)

    def _move_gang(self, gang: int) -> None:
        unit = self._members[gang]
        for item in unit:
            self.take(item)
        self._put_gang(self._in_order(unit))


@lru_cache(maxsize=256)
def _ways(sizes: tuple[int, ...]) -> Floats:
    """Every vector of whole numbers from 0 to below each of ``sizes``: ``[ways, K]``."""
    return np.indices(sizes).reshape(len(sizes), -1).T.astype(np.float64)


def _as_many_as(count: Ints, most: int) -> Ints:
    """Kinds of which there are no more than ``most`` ways to share them out; the rarest first."""
    order = np.argsort(count, kind="stable")
    return order[np.cumprod((count[order] + 1).astype(np.float64)) <= most]


def _members(gang: Ints) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for item in np.flatnonzero(gang != NO_GANG).tolist():
        found.setdefault(int(gang[item]), []).append(item)
    return found
