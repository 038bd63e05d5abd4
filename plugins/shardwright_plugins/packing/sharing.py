"""A few bins shared out anew, again and again: what finds a packing where hardly any room is left.

Large neighbourhood search (Shaw 1998): of all ways to share the items of two or three bins out among these, one that
leaves least over the limits is taken, even where it only leaves as much; so little room that is spread over many bins
comes together where it is needed. Legend: N items, G bins of a group, D dimensions.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shardwright.planning.options import Floats, Ints
from shardwright_plugins.packing.bins import Bins
from shardwright_plugins.packing.limits import excess

# So many ways to share out are looked at together.
_MOST_WAYS = 7_000
_MOST_BINS = 3
_ROUNDING = 1e-12
# How often gangs are moved instead, and the moves and swaps that follow.
_GANGS, _REPAIRS = 0.3, 20


def share_out(bins: Bins, rounds: int, *, seed: int = 0) -> bool:
    """Share groups of bins out anew as long as something is over the limits; whether nothing is any more.

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
        if bins.has_gangs and random.random() < _GANGS:
            _move_gangs(bins, random)
        else:
            group = _group(int(np.argmax(over)), len(over), random)
            _share(bins, group, float(over[group].sum()), random)
    return bool(bins.over().max() <= 0)


def _move_gangs(bins: Bins, random: np.random.Generator) -> None:
    """Move a gang, or change two of different hosts over, and repair; all as before if more is over the limits then."""
    before, saved = float(bins.over().sum()), (bins.used.copy(), bins.bin.copy())
    bins.change_gangs(random)
    bins.repair(_REPAIRS, pairs=2)
    if float(bins.over().sum()) > before + _ROUNDING:
        bins.used, bins.bin = saved


def _group(worst: int, num_bins: int, random: np.random.Generator) -> Ints:
    """The worst bin and one or two others, by chance: ``[G]``."""
    size = min(int(random.integers(2, _MOST_BINS + 1)), num_bins)
    others = np.delete(np.arange(num_bins), worst)
    return np.append(worst, random.choice(others, size - 1, replace=False))


def _share(bins: Bins, group: Ints, over: float, random: np.random.Generator) -> None:
    """Share the items of a group out as well as can be; as well in another way, if no way is better."""
    items = np.flatnonzero(np.isin(bins.bin, group) & bins.movable_within(group))
    most = int(np.log(_MOST_WAYS) / np.log(len(group)))
    items = random.permutation(items)[:most]
    if not len(items):
        return
    left = _left_over(bins, group, items)
    best = int(np.argmin(left))
    if left[best] >= over - _ROUNDING:
        best = int(random.choice(np.flatnonzero(left <= over + _ROUNDING)))
    for item, place in zip(items.tolist(), _ways(len(group), len(items))[0][best].tolist(), strict=True):
        bins.take(item)
        bins.put(item, int(group[place]))


def _left_over(bins: Bins, group: Ints, items: Ints) -> Floats:
    """What each way to share items out among a group leaves over its limits: ``[ways]``."""
    _, is_in = _ways(len(group), len(items))
    rest = bins.used[group].copy()
    for place, where in enumerate(group.tolist()):
        rest[place] -= bins.size[items[bins.bin[items] == where]].sum(axis=0)
    held = rest[:, None] + is_in @ bins.size[items]
    result: Floats = excess(held, bins.limit[group][:, None]).sum(axis=0)
    return result


@lru_cache(maxsize=64)
def _ways(num_bins: int, num_items: int) -> tuple[Ints, Floats]:
    """Every way to put items into bins: the bin of each item, ``[ways, N]``, and 1 where it is in, ``[G, ways, N]``."""
    places = np.indices((num_bins,) * num_items).reshape(num_items, -1).T
    return places, np.stack([places == place for place in range(num_bins)]).astype(np.float64)
