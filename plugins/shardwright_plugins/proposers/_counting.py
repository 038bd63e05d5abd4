"""Shards of few sizes over a few ranks: how many of each size go to each rank, exactly, by dynamic programming.

Rank after rank, the states are how many shards of each size are placed so far, all but those of the smallest size; the
value of a state is the most of these that find room beside them. That is the packing behind the dual approximation of
makespans (Hochbaum and Shmoys 1987). Its work grows with the product of the numbers of shards, so that only the
smallest sizes are shared out like this, and larger shards are put where there is most room (Graham 1969).

Legend: W ranks, K sizes, X states, P ways to fill a rank, J sizes in states.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from shardwright.planning.options import Floats, Ints

_MOST_STATES, _MOST_WAYS = 1500, 200
_NONE = -1e9
_ROUNDING, _ONE = 1e-12, 1e-9


@frozen(eq=False)
class _Ways:
    """The ways to fill a rank.

    Args:
        number: shards of each size in states: ``[P, J]``.
        rest: of the smallest size beside them: ``[P]``.
        fullest: the most that one of them takes.
    """

    number: Ints
    rest: Ints
    fullest: float

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


def shared_out(load: Floats, size: Floats, count: Ints, limit: float) -> Ints | None:
    """How many shards of each size go to each rank, none over a limit; ``None`` if there is no way, or too many.

    Args:
        load: what each rank has at first: ``[W]``.
        size: each different, falling: ``[K]``.
        count: how many shards there are of each: ``[K]``.
        limit: of each rank's load.

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
    number = np.zeros((len(load), len(size)), dtype=np.int64)
    for kind in np.repeat(np.arange(first), count[:first]).tolist():
        rank = int(np.argmax(room))
        if room[rank] < size[kind]:
            return None
        room[rank] -= size[kind]
        number[rank, kind] += 1
    return _filled(number, room, size, count, first)


def _first_in_states(count: Ints) -> int:
    """The largest size that the states count: as many sizes as there are not too many states."""
    states, first = 1, len(count) - 1
    while first > 0 and states * (int(count[first - 1]) + 1) <= _MOST_STATES:
        first -= 1
        states *= int(count[first]) + 1
    return first


def _filled(number: Ints, room: Floats, size: Floats, count: Ints, first: int) -> Ints | None:
    """The rest of the shards, those of the sizes from ``first`` on, in what room there is."""
    known: dict[float, _Ways] = {}
    for here in dict.fromkeys(room.tolist()):
        ways = _ways(here, size[first:], count[first:])
        if ways is None:
            return None
        known[here] = ways
    # What no way fills of each rank is lost.
    most = sum(known[here].fullest for here in room.tolist())
    if most * (1 + _ONE) < float(size[first:] @ count[first:]):
        return None
    return _dealt(number, room, size, count, known)


def _dealt(number: Ints, room: Floats, size: Floats, count: Ints, known: dict[float, _Ways]) -> Ints | None:
    """The ways that hold all shards together, rank after rank; ``None`` if none do."""
    first = len(size) - 1 - known[float(room[0])].number.shape[1]
    ranks, shape = np.argsort(-room, kind="stable").tolist(), tuple((count[first:-1] + 1).tolist())
    before = {here: ways.before(shape) for here, ways in known.items()}
    states = int(np.prod(shape, dtype=np.int64))
    value = np.full(states + 1, _NONE)
    value[0] = 0
    chosen = []
    for rank in ranks:
        here = float(room[rank])
        reached = value[before[here]] + known[here].rest[:, None]
        chosen.append(reached.argmax(axis=0))
        value[:-1] = reached.max(axis=0)
    if value[-2] < count[-1]:
        return None
    state = states - 1
    for rank, ways_of in zip(reversed(ranks), reversed(chosen), strict=True):
        here, way = float(room[rank]), int(ways_of[state])
        number[rank, first:-1], number[rank, -1] = known[here].number[way], known[here].rest[way]
        state = int(before[here][way, state])
    return _without_surplus(number, room, size, count, first)


def _ways(room: float, size: Floats, count: Ints) -> _Ways | None:
    """The ways to fill a rank with so much room; ``None`` if there are too many."""
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
    return _Ways(number, rest, float((taken + rest * size[-1]).max()))


def _without_surplus(number: Ints, room: Floats, size: Floats, count: Ints, first: int) -> Ints:
    """As many shards of the smallest size as there are: those on the fullest ranks are too many."""
    for _ in range(int(number[:, -1].sum() - count[-1])):
        left: Floats = room - number[:, first:] @ size[first:]
        number[int(np.argmin(np.where(number[:, -1] > 0, left, np.inf))), -1] -= 1
    return number
