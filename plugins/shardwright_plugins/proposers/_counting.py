"""Shards of few sizes over a few ranks: how many of each size go to each rank, exactly, by dynamic programming.

Rank after rank, the states are how many shards of each size are placed so far, all but those of the smallest size; the
value of a state is the most of these that find room beside them. That is the packing behind the dual approximation of
makespans (Hochbaum and Shmoys 1987). Its work grows with the product of the numbers of shards, so that only the
smallest sizes are shared out like this, and larger shards are put where there is most room (Graham 1969).

Legend: W ranks, K sizes, X states, P ways to fill a rank, J sizes in states.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from attrs import frozen

from shardwright.planning.options import Floats, Ints

_MOST_STATES, _MOST_WAYS = 1500, 200
# Ways to put the larger shards that are looked at, if there are no more of these.
_MOST_ARRANGEMENTS, _MOST_LARGE = 30, 12
# What shards are worth, for a proof that they do not go in: their sizes, but of one size so many times that.
_TIMES = (0.0, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0)
_NONE = -1e9
_ROUNDING, _ONE = 1e-12, 1e-9


@frozen(eq=False)
class _Ways:
    """The ways to fill a rank.

    Args:
        number: shards of each size in states: ``[P, J]``.
        rest: of the smallest size beside them: ``[P]``.
        worth: the most that one of them is worth, at each of some prices of the sizes: ``[Q]``.
    """

    number: Ints
    rest: Ints
    worth: Floats

    def before(self, shape: tuple[int, ...]) -> Ints:
        """The state that leads to each state: ``[P, X]``; ``X`` where there is none.

        Args:
            shape: one more than there are shards of each size in states: ``J``.
        """
        states = int(np.prod(shape, dtype=np.int64))
        index, exists = np.zeros((len(self.number), states), dtype=np.int64), True
        stride, state = states, np.arange(states)
        for number, size in zip(self.number.T, shape, strict=True):
            stride //= size
            left = state // stride % size - number[:, None]
            index += left * stride
            exists = exists & (left >= 0)
        return np.where(exists, index, states)


def shared_out(
    load: Floats, size: Floats, count: Ints, limit: float, *, is_thorough: bool = False
) -> Ints | None:
    """How many shards of each size go to each rank, none over a limit; ``None`` if there is no way, or too many.

    Args:
        load: what each rank has at first: ``[W]``.
        size: each different, falling: ``[K]``.
        count: how many shards there are of each: ``[K]``.
        limit: of each rank's load.
        is_thorough: whether ways to put the largest shards are tried other than where there is most room.

    Returns:
        ``[W, K]``.
    """
    room = limit * (1 + _ROUNDING) - load
    if room.min() < 0 or float(room.sum()) < float(size @ count):
        return None
    if not len(size):
        return np.zeros((len(load), 0), dtype=np.int64)
    if (np.floor(room[:, None] / size * (1 + _ONE)).sum(axis=0) < count).any():
        return None  # there is no room for all of one size, the others left out
    first = _first_in_states(count)
    known: dict[float, _Ways | None] = {}
    for number in _arrangements(room, size[:first], count[:first], is_thorough=is_thorough):
        left = room - number @ size[:first]
        if _is_refuted(left, size[first:], count[first:], known):
            continue
        shares = np.hstack([number, np.zeros((len(room), len(size) - first), dtype=np.int64)])
        ways = {here: found for here in left.tolist() if (found := known[here]) is not None}
        shared = _dealt(shares, left, size, count, ways)
        if shared is not None:
            return shared
    return None


def _arrangements(room: Floats, size: Floats, count: Ints, *, is_thorough: bool) -> Iterator[Ints]:
    """Ways to put the largest shards on ranks, ``[W, K]`` each: where there is most room, or some others.

    Args:
        room: of each rank: ``[W]``.
        size: of these shards, falling: ``[K]``.
        count: how many there are of each: ``[K]``.
        is_thorough: whether others are asked for.
    """
    if is_thorough:
        if 0 < int(count.sum()) <= _MOST_LARGE:
            yield from _others(room, size.tolist(), np.repeat(np.arange(len(size)), count).tolist())
        return
    number, left = np.zeros((len(room), len(size)), dtype=np.int64), room.copy()
    for kind in np.repeat(np.arange(len(size)), count).tolist():
        rank = int(np.argmax(left))
        if left[rank] < size[kind]:
            break
        left[rank] -= size[kind]
        number[rank, kind] += 1
    else:
        yield number


def _others(room: Floats, size: list[float], kinds: list[int]) -> Iterator[Ints]:
    """Ways to put shards on ranks, ranks of equal room being alike: those that open the fewest ranks first.

    What stands in a rank is ``(its room, its shards)``; a way is what stands in the ranks that are not empty.
    """
    rooms, number = np.unique(room, return_counts=True)
    free = dict(zip(rooms.tolist(), number.tolist(), strict=True))
    ways: set[tuple[tuple[float, tuple[int, ...]], ...]] = {()}
    for kind in kinds:
        more = set[tuple[tuple[float, tuple[int, ...]], ...]]()
        for way in ways:
            opened = [(have, ()) for have, most in free.items() if sum(one[0] == have for one in way) < most]
            for one in dict.fromkeys([*way, *opened]):
                have, held = one
                if have - sum(size[other] for other in held) >= size[kind]:
                    rest = list(way)
                    if held:
                        rest.remove(one)
                    more.add(tuple(sorted([*rest, (have, (*held, kind))])))
        ways = set(sorted(more, key=lambda way: (len(way), way))[:_MOST_ARRANGEMENTS])
    for way in sorted(ways, key=lambda way: (len(way), way)):
        found, left = np.zeros((len(room), len(size)), dtype=np.int64), room.tolist()
        for have, held in way:
            rank = left.index(have)
            left[rank] = -1.0
            np.add.at(found[rank], list(held), 1)
        yield found


def _is_refuted(left: Floats, size: Floats, count: Ints, known: dict[float, _Ways | None]) -> bool:
    """Whether shards are worth more than the best of what fits on each rank, by some prices; or ways are too many.

    Args:
        left: what is left of each rank: ``[W]``.
        size: of these shards, falling: ``[K]``.
        count: how many there are of each: ``[K]``.
        known: the ways to fill a rank, by what is left of it.
    """
    prices = _prices(size)
    most = np.zeros(len(prices))
    for here in left.tolist():
        if here not in known:
            known[here] = _ways(here, size, count, prices)
        ways = known[here]
        if ways is None:
            return True
        most = most + ways.worth
    return bool((prices @ count > most * (1 + _ONE)).any())


def _prices(size: Floats) -> Floats:
    """What shards of each size may be worth: ``[Q, K]``."""
    times = np.ones((len(_TIMES), len(size), len(size)))
    each = np.arange(len(size))
    times[:, each, each] = np.array(_TIMES)[:, None]
    return times.reshape(-1, len(size)) * size


def _first_in_states(count: Ints) -> int:
    """The largest size that the states count: as many sizes as there are not too many states."""
    states, first = 1, len(count) - 1
    while first > 0 and states * (int(count[first - 1]) + 1) <= _MOST_STATES:
        first -= 1
        states *= int(count[first]) + 1
    return first


def _dealt(number: Ints, room: Floats, size: Floats, count: Ints, known: dict[float, _Ways]) -> Ints | None:
    """The ways that hold all shards together, rank after rank; ``None`` if none do."""
    first = len(size) - 1 - known[float(room[0])].number.shape[1]
    ranks, shape = np.argsort(-room, kind="stable").tolist(), tuple((count[first:-1] + 1).tolist())
    before = {here: ways.before(shape) for here, ways in known.items()}
    states = int(np.prod(shape, dtype=np.int64))
    values = [np.full(states + 1, _NONE)]
    values[0][0] = 0
    for rank in ranks:
        here = float(room[rank])
        reached = (values[-1][before[here]] + known[here].rest[:, None]).max(axis=0)
        values.append(np.append(reached, _NONE))
    if values.pop()[-2] < count[-1]:
        return None
    state = states - 1
    for rank in reversed(ranks):
        here = float(room[rank])
        led = before[here][:, state]
        way = int(np.argmax(values.pop()[led] + known[here].rest))
        number[rank, first:-1], number[rank, -1] = known[here].number[way], known[here].rest[way]
        state = int(led[way])
    return _without_surplus(number, room, size, count, first)


def _ways(room: float, size: Floats, count: Ints, prices: Floats) -> _Ways | None:
    """The ways to fill a rank with so much room, and their worth; ``None`` if there are too many."""
    most = [
        1 + min(int(room / one), number)
        for one, number in zip(size[:-1].tolist(), count[:-1].tolist(), strict=True)
    ]
    if np.prod(most, dtype=np.float64) > _MOST_WAYS:
        return None
    number = np.indices(most).reshape(len(most), -1).T if most else np.zeros((1, 0), dtype=np.int64)
    taken = number @ size[:-1]
    fits = taken <= room
    number, taken = number[fits], taken[fits]
    rest = np.minimum((room - taken) / size[-1] * (1 + _ROUNDING), float(count[-1])).astype(np.int64)
    worth: Floats = (number @ prices[:, :-1].T + rest[:, None] * prices[:, -1]).max(axis=0)
    return _Ways(number, rest, worth)


def _without_surplus(number: Ints, room: Floats, size: Floats, count: Ints, first: int) -> Ints:
    """As many shards of the smallest size as there are: those on the fullest ranks are too many."""
    for _ in range(int(number[:, -1].sum() - count[-1])):
        left: Floats = room - number[:, first:] @ size[first:]
        number[int(np.argmin(np.where(number[:, -1] > 0, left, np.inf))), -1] -= 1
    return number
