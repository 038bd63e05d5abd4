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
_ROUNDING = 1e-12


@frozen(eq=False)
class _Ways:
    """The ways to fill a rank.

    Args:
        number: shards of each size in states: ``[P, J]``.
        rest: of the smallest size beside them: ``[P]``.
        before: the state that leads to each state: ``[P, X]``; ``X`` where there is none.
    """

    number: Ints
    rest: Ints
    before: Ints


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
    ranks = np.argsort(-room, kind="stable").tolist()
    shape = tuple((count[first:-1] + 1).tolist())
    states = int(np.prod(shape, dtype=np.int64))
    value = np.full(states + 1, _NONE)
    value[0] = 0
    known: dict[float, _Ways] = {}
    steps: list[tuple[_Ways, Ints]] = []
    for rank in ranks:
        here = float(room[rank])
        if here not in known:
            ways = _ways(here, size[first:], shape)
            if ways is None:
                return None
            known[here] = ways
        ways = known[here]
        reached = value[ways.before] + ways.rest[:, None]
        chosen = reached.argmax(axis=0)
        value = np.append(reached[chosen, np.arange(states)], _NONE)
        steps.append((ways, chosen))
    if value[-2] < count[-1]:
        return None
    state = states - 1
    for rank, (ways, chosen) in zip(reversed(ranks), reversed(steps), strict=True):
        way = int(chosen[state])
        number[rank, first:-1], number[rank, -1] = ways.number[way], ways.rest[way]
        state = int(ways.before[way, state])
    return _without_surplus(number, room, size, count, first)


def _ways(room: float, size: Floats, shape: tuple[int, ...]) -> _Ways | None:
    """The ways to fill a rank with so much room; ``None`` if there are too many."""
    most = [min(int(room / one) + 1, number) for one, number in zip(size[:-1].tolist(), shape, strict=True)]
    if np.prod(most, dtype=np.float64) > _MOST_WAYS:
        return None
    number = np.indices(most).reshape(len(most), -1).T if most else np.zeros((1, 0), dtype=np.int64)
    left = room - number @ size[:-1]
    number, left = number[left >= -_ROUNDING * room], left[left >= -_ROUNDING * room]
    rest = np.floor(np.maximum(left, 0) / size[-1] * (1 + 1e-12)).astype(np.int64)
    if not shape:
        return _Ways(number, rest, np.zeros((1, 1), dtype=np.int64))
    states = np.indices(shape).reshape(len(shape), 1, -1)
    before = states - number.T[:, :, None]
    index = np.ravel_multi_index(tuple(np.maximum(before, 0)), shape)
    return _Ways(number, rest, np.where((before >= 0).all(axis=0), index, states.shape[2]))


def _without_surplus(number: Ints, room: Floats, size: Floats, count: Ints, first: int) -> Ints:
    """As many shards of the smallest size as there are: those on the fullest ranks are too many."""
    for _ in range(int(number[:, -1].sum() - count[-1])):
        left = room - number[:, first:] @ size[first:]
        number[int(np.argmin(np.where(number[:, -1] > 0, left, np.inf))), -1] -= 1
    return number
