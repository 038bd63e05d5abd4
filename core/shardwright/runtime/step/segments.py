"""Copies of many pieces of flat tensors in a few calls.

A piece of a flat tensor has a start and a size. Long pieces are copied one by one, at the speed of memory. Short ones,
as among thousands of ranks, are copied by an index of every element. Where a tensor ``is_cpu`` its memory is the host's
(as :func:`shardwright.runtime.ranks.devices.is_host` says), and NumPy copies and sorts faster than torch.

Legend: n pieces, P parts, W peers, N keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from operator import getitem
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.devices import is_host, sent_to

_LONG = 64  # elements: copying a longer piece by itself takes less time than an index of its elements
_FEW = 32  # pieces: for fewer an index is not worth making
_R = TypeVar("_R")
_bytes_of = np.ndarray.tobytes
_SHORTEST_KEYS, _SHORT_KEYS = 1 << 8, 1 << 16  # keys that NumPy sorts by radix, in one pass and in two


total: Any = np.add.reduce
"""The sum of an array, or of each of its columns or rows by ``axis``: in one call, where its method takes three."""
FALSE = b"\0"
"""A false element among the bytes of a mask, where it is found in a third of the time of NumPy's reduction."""


def starts_of(sizes: Ints) -> Ints:
    """Start of each piece, for pieces that stand one after the other: ``[n]``."""
    stops: Ints = sizes.cumsum()
    return stops - sizes


def repeated(values: Ints, counts: Ints, device: torch.device) -> Tensor:
    """Repeat each host value as often as its count says, on a device: ``[sum of counts]`` int64."""
    if is_host(device):
        # Few are used among many ranks: to repeat a value no time takes time, too. NumPy searches a mask in a sixth of
        # the time that it takes for numbers.
        (used,) = (counts > 0).nonzero()
        return torch.from_numpy(values[used].repeat(counts[used]))
    own, times = (sent_to(device, numbers) for numbers in (values, counts))
    return own.repeat_interleave(times, output_size=int(counts.sum()))


def numbered(counts: Tensor, total: int) -> Tensor:
    """Number pieces from 0, each number as often as the piece has elements: ``[total]`` int64.

    Args:
        counts: elements of each piece, ``[n]``, on the device of the result.
        total: sum of the counts.
    """
    return spread(torch.arange(counts.shape[0], device=counts.device), counts, total)


def spread(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """Repeat each value as often as its count says: ``[total]``.

    Args:
        values: value of each piece, ``[n]``.
        counts: elements of each piece, ``[n]``, on the device of the values.
        total: sum of the counts, known to the host, so that it need not wait for the device.
    """
    if counts.is_cpu:
        return torch.from_numpy(values.numpy().repeat(counts.numpy()))
    return values.repeat_interleave(counts, output_size=total)


def places_where(mask: Tensor, total: int) -> Tensor:
    """Places at which a mask is true, in rising order: ``[total]`` int64.

    Args:
        mask: ``[N]``.
        total: all true places, known to the host, so that it need not wait for the device.
    """
    if mask.is_cpu:
        return torch.from_numpy(mask.numpy().nonzero()[0])
    reached = mask.cumsum(0, dtype=torch.int32)  # true places up to each, its own included
    wanted = torch.arange(1, total + 1, dtype=reached.dtype, device=reached.device)
    return torch.searchsorted(reached, wanted)


def index_of(starts: Ints, sizes: Ints, device: torch.device) -> Tensor:
    """Places of all elements of pieces, piece after piece: ``[sum of sizes]`` int64."""
    # Element k of the result stands k - (start of its piece in the result) behind the piece's start in the source.
    places = repeated(starts - starts_of(sizes), sizes, device)
    return places.add_(torch.arange(places.shape[0], device=device))


def _are_short(sizes: Ints) -> bool:
    """True if pieces are many and short, so that they are copied by an index."""
    return sizes.size > _FEW and int(total(sizes, axis=None)) < _LONG * sizes.size


class LastResult:
    """The last result of a function of arrays, which is given again for equal arrays.

    Sizes are often those of the batch before. To compare their bytes takes a tenth of the time of what follows from
    them. Results must not be changed.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, Any] = None, None

    def of(self, function: Callable[..., _R], *arrays: Ints) -> _R:
        """Call a function, always the same one, unless its arguments are those of the last call."""
        key, known = list(map(_bytes_of, arrays)), self._known
        if known[0] != key:
            known = self._known = key, function(*arrays)
        result: _R = known[1]
        return result


class Selection:
    """Pieces of flat tensors that are to stand one after the other.

    Args:
        starts: start of each piece, ``[n]``.
        sizes: elements of each piece, ``[n]``.
    """

    def __init__(self, starts: Ints, sizes: Ints) -> None:
        self._starts, self._sizes, stops = starts, sizes, starts + sizes
        self._run: slice | None = None
        self._spans: list[slice] = []
        if starts[1:].tobytes() == stops[:-1].tobytes():  # neighbours in order, or fewer than two
            self._run = slice(int(starts[0]), int(stops[-1])) if starts.size else slice(0, 0)
        elif not _are_short(sizes):
            self._spans = list(map(slice, starts.tolist(), stops.tolist()))

    def of(self, values: Tensor) -> Tensor:
        """The pieces of a flat tensor; a view if they are neighbours in order."""
        if self._run is not None:
            return values[self._run]
        if not self._spans:
            return values.index_select(0, index_of(self._starts, self._sizes, values.device))
        if not values.is_cpu:
            return torch.cat(list(map(values.__getitem__, self._spans)))
        taken = np.concatenate(list(map(values.numpy().__getitem__, self._spans)))
        # An empty array has strides of 0, which cannot be viewed as bytes.
        return torch.from_numpy(taken) if taken.size else values[:0]


def take(values: Tensor, starts: Ints, sizes: Ints) -> Tensor:
    """Concatenate pieces of a flat tensor; a view is returned if they are neighbours in order."""
    return Selection(starts, sizes).of(values)


def filled_up(values: Tensor, sizes: Ints, wanted: Ints) -> Tensor:
    """Fill up each piece of a flat tensor with zeros.

    Args:
        values: the pieces, one after the other.
        sizes: elements of each piece, ``[n]``.
        wanted: elements that each is to have, at least its size, ``[n]``.
    """
    filled = values.new_zeros(int(wanted.sum()))
    filled[index_of(starts_of(wanted), sizes, values.device)] = values
    return filled


class Interleaving:
    """The order in which flat tensors with a piece for every peer are merged: first all pieces for peer 0, then for 1.

    Args:
        sizes: elements of each part's piece for each peer, ``[P, W]``.
    """

    def __init__(self, sizes: Ints) -> None:
        self._sizes, self._count = sizes, int(total(sizes, axis=None))
        self._spans: list[slice] = []
        if len(sizes) > 1 and not _are_short(sizes):
            stops = sizes.cumsum(1)
            self._spans = list(
                map(slice, (stops - sizes).T.reshape(-1).tolist(), stops.T.reshape(-1).tolist())
            )

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        """Merge the parts, ``P`` of one dtype; each has its pieces peer after peer."""
        if self._spans and self._count and parts[0].is_cpu:
            arrays: Iterator[Any] = cycle(map(Tensor.numpy, parts))  # one for each span, peer after peer
            return torch.from_numpy(np.concatenate(list(map(getitem, arrays, self._spans))))
        if len(parts) == 1:
            return parts[0]
        out = parts[0].new_empty(self._count)
        for values, places, own in zip(parts, places_of(self._sizes), self._sizes, strict=True):
            out[index_of(places, own, out.device)] = values
        return out


class Dealing:
    """The places at which what an :class:`Interleaving` merged is split into the parts again.

    Args:
        sizes: elements of each part's piece for each peer, ``[P, W]``.
    """

    def __init__(self, sizes: Ints) -> None:
        num_parts, self._num_peers = sizes.shape
        self._sizes: list[int] = []
        self._parts: list[Selection] = []
        self._of_part = [slice(part, None, num_parts) for part in range(num_parts)]
        if num_parts > 1 and _are_short(sizes):
            self._parts = list(map(Selection, places_of(sizes), sizes))
        elif num_parts > 1:
            self._sizes = sizes.T.reshape(-1).tolist()

    def of(self, flat: Tensor) -> list[Tensor]:
        """Split a flat tensor into the parts; views of it where there is one part, or one peer."""
        if self._parts:
            return [part.of(flat) for part in self._parts]
        if not self._sizes:
            return [flat]
        pieces = flat.split_with_sizes(self._sizes)
        if self._num_peers == 1:
            return list(pieces)
        return list(map(torch.cat, map(pieces.__getitem__, self._of_part)))


def places_of(sizes: Ints) -> Ints:
    """Start of each part's piece for each peer in the result of an :class:`Interleaving`: ``[P, W]``."""
    # A running sum over the sizes in the order of the result: by peer, then by part.
    by_peer = sizes.T.reshape(-1)
    return (by_peer.cumsum() - by_peer).reshape(sizes.shape[::-1]).T


def run_or_places(places: Ints) -> Ints | slice:
    """Return a slice if the places are neighbours in rising order, by which an array is read without a copy."""
    first = int(places[0]) if places.size else 0
    is_run = np.array_equal(places, np.arange(first, first + places.size))
    return slice(first, first + places.size) if is_run else places


def sums(values: Ints, bounds: Ints) -> Ints:
    """Sum each run ``bounds[i] <= place < bounds[i + 1]``; runs may be empty."""
    found = np.zeros(len(bounds) - 1, dtype=np.int64)
    # For an empty run reduceat gives the first value of the next.
    (used,) = (bounds[1:] > bounds[:-1]).nonzero()
    if used.size:
        found[used] = np.add.reduceat(values[: bounds[-1]], bounds[used], dtype=np.int64)
    return found


def order_of(keys: Tensor, num_keys: int) -> Tensor:
    """Stable argsort of keys ``0 <= key < num_keys``: ``[N]`` int64.

    On the CPU this is a radix sort by 8 or 16 bits at a time, the lowest first.
    """
    if not keys.is_cpu:
        return torch.argsort(keys, stable=True)
    own = keys.numpy()
    kind: Any = np.uint8 if num_keys <= _SHORTEST_KEYS else np.uint16
    # By the lowest bits first: NumPy sorts 8 and 16 bits by radix.
    order = own.astype(kind).argsort(kind="stable")
    # Then by the next 16 bits. The sort is stable, so equal keys stay in the order of their lower bits.
    while num_keys > _SHORT_KEYS:
        own, num_keys = own >> 16, -(-num_keys >> 16)
        order = order[own.astype(np.uint16)[order].argsort(kind="stable")]
    return torch.from_numpy(order)


def counts_of(keys: Tensor, num_keys: int) -> Tensor:
    """Count the occurrences of each key: ``[num_keys]`` int64."""
    if keys.is_cpu:
        return torch.bincount(keys, minlength=num_keys)
    # Counting on a device by bincount would make the host wait for the greatest key.
    counts = torch.zeros(num_keys, dtype=torch.int64, device=keys.device)
    return counts.scatter_add_(0, keys, torch.ones_like(keys))
