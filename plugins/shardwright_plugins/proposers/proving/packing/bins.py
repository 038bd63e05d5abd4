"""Shards in ranks, each with a limit of time and of every memory tier: filling them, and repairing what is over.

Vector bin packing with a fixed number of bins: units are put longest first (Graham 1969) where the fullest dimension of
the rank stays least full. Local search then moves and swaps items as long as that takes away from the *excess*, the sum
over bins and dimensions of ``max(0, used / limit - 1)``.

Each of the ``C`` classes of ranks of one speed has a dimension of time. A bin adds up what its items would take on
ranks of each class, and only its own class has a limit there. So an item takes as long as its bin makes it.

Legend: N items, W bins (ranks), C classes, D dimensions (time by class first, then memory tiers), L ranks of a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from shardwright.planning.arrays import FREE, NO_GANG, Floats, Ints, distinct
from shardwright.planning.search.placement import ProposedShards
from shardwright.planning.watch import Watch

# Rounding: a bin is over its limit by more than this part of it.
SLACK = 1e-9
_LEAST = 1e-300
# Partners of a swap are looked for in so many of the emptiest ranks.
_PARTNERS = 48
# A repair ends when so many of the worst bins in a row cannot be relieved.
_MOST_STUCK = 16
# Microseconds of a step, and of each number that it looks at (measured).
_STEP_US, _CELL_US = 150.0, 0.02


class Bins:
    """Items in bins.

    Args:
        size: load of each item, ``[N, D]``.
        used: load of the bins before: ``[W, D]``.
        limit: ``[W, D]``, of time that of the own class alone; see :func:`limits`.
        rank_class: the class of each bin: ``[W]``.
        gang: items of one number go to one host; ``NO_GANG``: alone. ``[N]``.
        local: the bin of its host that an item of a gang must have, or ``FREE``: ``[N]``.
        bins_per_host: ``L``.
        kind: items of one number are equal: ``[N]``.
        watch: ends repairs, and counts their work.
    """

    def __init__(
        self,
        size: Floats,
        used: Floats,
        limit: Floats,
        rank_class: Ints,
        gang: Ints,
        local: Ints,
        bins_per_host: int,
        kind: Ints,
        watch: Watch,
    ) -> None:
        self.kind, self.watch = kind, watch
        self.size, self.limit = size, np.maximum(limit, 1e-30)
        self.used = used.copy()
        self.num_classes = int(rank_class.max()) + 1
        self._own_time = np.arange(len(used)), rank_class
        self.gang, self.local, self.bins_per_host = gang, local, bins_per_host
        self.bin: Ints = np.full(len(size), FREE)
        self._alone = gang == NO_GANG
        self.members = _members(gang)
        """The items of each gang."""
        self._is_settled = np.zeros(len(size), dtype=bool)

    @classmethod
    def of(cls, shards: ProposedShards, limit_ms: float, kind: Ints, watch: Watch) -> Bins:
        """Shards that may move, in no bin yet, and ranks with what they have by layouts.

        Args:
            shards: shards of a proposal.
            limit_ms: the time that no rank should exceed.
            kind: shards of one number are equal: ``[N]``.
            watch: ends repairs, and counts their work.
        """
        fixed_ms = np.repeat(shards.fixed_ms[:, None], shards.class_ms.shape[1], axis=1)
        return cls(
            np.hstack([shards.class_ms, shards.memory_bytes]),
            np.hstack([fixed_ms, shards.fixed_bytes]),
            limits(limit_ms, shards.rank_class, memory_limits(shards.capacity_bytes)),
            shards.rank_class,
            shards.gang,
            shards.local_rank,
            shards.local_world_size,
            kind,
            watch,
        )

    @property
    def time_ms(self) -> Floats:
        """Time of each bin: ``[W]``."""
        return self.used[self._own_time]

    @property
    def memory_bytes(self) -> Floats:
        """Memory that is used in each bin: ``[W, M]``."""
        return self.used[:, self.num_classes :]

    @property
    def limit_ms(self) -> float:
        """Limit of the time of each bin."""
        return float(self.limit[self._own_time][0])

    def within(self, limit_ms: float) -> None:
        """Limit the time of all bins."""
        self.limit = self.limit.copy()
        self.limit[self._own_time] = limit_ms

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
                    if self.bin[self.members[gang][0]] == FREE:
                        self._put_gang(self._in_order(self.members[gang]))
            else:
                self._put_equal(run)

    def _in_order(self, unit: Sequence[int]) -> list[int]:
        """Sort items: those with a place in their host first, then the longest."""
        return sorted(unit, key=lambda item: (self.local[item] == FREE, -self.size[item, 0], item))

    def _put_equal(self, items: Ints) -> None:
        """Put equal items where one after the other, each in the emptiest bin with room, would come to lie."""
        count, size = len(items), self.size[items[0]]
        if count > 1:
            deep = min(count, 2 + 2 * -(-count // len(self.used)))
            levels = np.arange(1, deep + 1)
            memory = self.limit[:, self.num_classes :] * (1 + SLACK)
            room = (memory - self.memory_bytes) / np.maximum(size[self.num_classes :], 1e-30)
            after = (self.used[:, None] + levels[:, None] * size) / self.limit[:, None]
            load = fullness(after, self.num_classes)
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
        """Find the bin whose fullest dimension is least full with the item; within limits, if that can be."""
        after = (self.used + self.size[item]) / self.limit
        fullest = fullness(after, self.num_classes)
        fits = after[:, self.num_classes :].max(axis=1, initial=0.0) <= 1 + SLACK
        return int(np.argmin(np.where(fits, fullest, 1e6 + fullest)))

    def _put_gang(self, unit: Sequence[int]) -> None:
        """Put a gang on the host where it does least harm."""
        places = gang_bins(
            self.used, self.limit, self.num_classes, self.size[unit], self.local[unit], self.bins_per_host
        )
        for item, where in zip(unit, places, strict=True):
            self.put(item, where)

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
        self.members.pop(int(self.gang[item]), None)

    def remove(self, items: Sequence[int]) -> None:
        """Take items out for good."""
        for item in items:
            self.take(item)
        self._is_settled[items] = True
        self._alone[items] = False
        for gang in distinct(self.gang[items]).tolist():
            self.members.pop(gang, None)

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
                self.members.setdefault(number, []).append(item)
        for item, where in zip(new, bins, strict=True):
            self.put(item, where)
        return new

    def copy(self) -> Bins:
        """Copy the items in their bins."""
        twin = copy(self)
        twin.used, twin.bin = self.used.copy(), self.bin.copy()
        twin._alone, twin._is_settled, twin.members = (
            self._alone.copy(),
            self._is_settled.copy(),
            dict(self.members),
        )
        return twin

    # -- repair ----------------------------------------------------------------------------------------------

    def over(self) -> Floats:
        """Compute the excess of each bin over its limits, in parts of them, all dimensions together: ``[W]``."""
        return excess(self.used, self.limit)

    def repair(self, steps: int) -> bool:
        """Move and swap items as long as less is over the limits; whether nothing is over any more.

        Args:
            steps: largest number of steps.
        """
        stuck: set[int] = set()
        for _ in range(steps):
            over = self.over()
            if over.max() <= 0:
                return True
            if self.watch.is_over or len(stuck) >= _MOST_STUCK:
                return False
            order = np.argsort(-over, kind="stable")
            worst = next(
                (int(b) for b in order[: len(stuck) + 1] if over[b] > 0 and int(b) not in stuck), None
            )
            if worst is None:
                return False
            if self._relieve(worst, over):
                stuck.clear()
            else:
                stuck.add(worst)
        return bool(self.over().max() <= 0)

    def _relieve(self, worst: int, over: Floats) -> bool:
        """Make the best move or swap out of a bin, if one is good."""
        mine = np.flatnonzero((self.bin == worst) & self._alone)
        self.watch.spend(_STEP_US + _CELL_US * len(mine) * self.used.size)
        best, act = -1e-12, None
        if len(mine):
            gain, item, where = self._best_move(mine, worst, over)
            if gain < best:
                best, act = gain, (item, where, -1)
            gain, item, other = self._best_swap(mine, worst, over)
            if gain < best:
                best, act = gain, (item, int(self.bin[other]) if other >= 0 else -1, other)
        if act is None:
            return False
        item, where, other = act
        self.take(item)
        if other >= 0:
            self.take(other)
            self.put(other, worst)
        self.put(item, where)
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
        self.watch.spend(_CELL_US * len(mine) * len(others) * self.size.shape[1])
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


def _members(gang: Ints) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for item in np.flatnonzero(gang != NO_GANG).tolist():
        found.setdefault(int(gang[item]), []).append(item)
    return found


def memory_limits(capacity_bytes: Ints) -> Floats:
    """Limits of memory that, exceeded by rounding, are still no more than there is: ``[W, M]``."""
    limits: Floats = capacity_bytes / (1 + SLACK)
    return limits


def limits(limit_ms: float, rank_class: Ints, memory: Floats | Ints) -> Floats:
    """Limits of bins: ``[W, D]``.

    Args:
        limit_ms: the time that no rank should exceed.
        rank_class: the class of each rank: ``[W]``.
        memory: limits of memory: ``[W, M]``.
    """
    time = np.full((len(rank_class), int(rank_class.max()) + 1), np.inf)
    time[np.arange(len(rank_class)), rank_class] = limit_ms
    return np.hstack([time, memory])


def largest(limit: Floats, num_classes: int) -> Floats:
    """The limit of time, of each class, and the largest limits of memory: ``[D]``."""
    return np.append(limit[:, :num_classes].min(axis=0), limit[:, num_classes:].max(axis=0))


def gang_bins(
    used: Floats, limit: Floats, num_classes: int, size: Floats, local: Ints, bins_per_host: int
) -> list[int]:
    """The bins of the host where a gang of items ``[K, D]`` does least harm, one an item."""
    hosts = len(used) // bins_per_host
    trial = used.reshape(hosts, bins_per_host, -1).copy()
    most = limit.reshape(trial.shape)
    places = []
    rows = np.arange(hosts)
    for index, place in enumerate(local.tolist()):
        is_free = place == FREE
        after = (trial + size[index]) / most if is_free else most
        column = after.max(axis=2).argmin(axis=1) if is_free else np.full(hosts, place)
        trial[rows, column] += size[index]
        places.append(column)
    over = np.maximum(trial / most - 1, 0).sum(axis=(1, 2))
    fullest = (trial / most)[..., :num_classes].max(axis=(1, 2))
    host = int(np.lexsort((fullest, over))[0])
    return [host * bins_per_host + int(column[host]) for column in places]


def fullness(parts: Floats, num_classes: int) -> Floats:
    """Rate the load of bins by their fullest dimension; of equally full ones, that with less time comes first."""
    result: Floats = parts.max(axis=-1) + 0.05 * parts[..., :num_classes].max(axis=-1)
    return result


def excess(used: Floats, limit: Floats) -> Floats:
    """Compute the excess of bins over their limits, in parts of them, summed over dimensions: ``[..., D] -> [...]``."""
    room = np.maximum(limit, _LEAST)  # shards may cost nothing, and so their limit may be 0
    result: Floats = np.maximum(used / room - (1 + SLACK), 0).sum(axis=-1)
    return result
