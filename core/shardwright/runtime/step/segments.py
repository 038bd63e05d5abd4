"""Many pieces of flat tensors moved in a few calls, however many pieces there are.

A piece of a flat tensor has a start and a size. Where pieces are long they are copied one by one, which is as quick as
memory; where they are short, as among thousands of ranks, by an index of every element.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.ranks.devices import is_host

_LONG = 64  # elements: from there on copying a piece by itself takes less than an index of its elements
_FEW = 32  # pieces: of so many an index is not worth its making
_SHORTEST_KEYS, _SHORT_KEYS = 1 << 8, 1 << 16  # what NumPy sorts by radix, in one pass and in two


def starts_of(sizes: Ints) -> Ints:
    """Where each of pieces that stand one after the other begins: ``[n]``."""
    stops: Ints = sizes.cumsum()
    return stops - sizes


def repeated(values: Ints, counts: Ints, device: torch.device) -> Tensor:
    """Each value as often as its count says: ``[sum of counts]`` int64."""
    if is_host(device):
        return torch.from_numpy(np.repeat(values, counts))
    own, times = (torch.from_numpy(numbers).to(device, non_blocking=True) for numbers in (values, counts))
    return own.repeat_interleave(times, output_size=int(counts.sum()))


def numbered(counts: Tensor, total: int) -> Tensor:
    """Number pieces from 0, each number as often as the piece has elements: ``[total]`` int64.

    Args:
        counts: elements of each piece, in the memory of the device.
        total: their sum.
    """
    return spread(torch.arange(len(counts), device=counts.device), counts, total)


def spread(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """Repeat each value as often as its count says: ``[total]``.

    Args:
        values: of each piece.
        counts: elements of each piece, in the memory of the device.
        total: their sum.
    """
    if is_host(counts.device):
        return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))
    return values.repeat_interleave(counts, output_size=total)


def places_where(mask: Tensor) -> Tensor:
    """The places at which a mask is true, rising."""
    if is_host(mask.device):
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def index_of(starts: Ints, sizes: Ints, device: torch.device) -> Tensor:
    """The places of all elements of pieces, piece after piece: ``[sum of sizes]`` int64."""
    places = repeated(starts - starts_of(sizes), sizes, device)
    return places.add_(torch.arange(len(places), device=device))


def take(values: Tensor, starts: Ints, sizes: Ints) -> Tensor:
    """Pieces of a flat tensor, one after the other; not copied if that is how they stand."""
    stops = starts + sizes
    if (starts[1:] == stops[:-1]).all():
        return values[int(starts[0]) : int(stops[-1])] if len(starts) else values[:0]
    if int(sizes.sum()) < _LONG * len(sizes) and len(sizes) > _FEW:
        return values.index_select(0, index_of(starts, sizes, values.device))
    return _joined(values, [slice(*span) for span in zip(starts.tolist(), stops.tolist(), strict=True)])


def _joined(values: Tensor, pieces: Sequence[slice]) -> Tensor:
    """Pieces, copied one by one."""
    if len(pieces) == 1:
        return values[pieces[0]]
    if is_host(values.device):
        own = values.numpy()
        return _as_tensor(np.concatenate([own[piece] for piece in pieces]), values)
    return torch.cat([values[piece] for piece in pieces])


def interleave(parts: Sequence[Tensor], sizes: Ints) -> Tensor:
    """Flat tensors of one dtype, each a piece for every peer, as one: peer after peer the pieces of all.

    Args:
        parts: ``P`` tensors.
        sizes: elements of each one's piece for each peer, ``[P, W]``.
    """
    if len(parts) == 1:
        return parts[0]
    if is_host(parts[0].device) and _are_few(sizes):
        pieces = _in_turn([part.numpy() for part in parts], sizes.tolist())
        return _as_tensor(np.concatenate(pieces), parts[0])
    out = parts[0].new_empty(int(sizes.sum()))
    for part, places, own in zip(parts, places_of(sizes), sizes, strict=True):
        out[index_of(places, own, out.device)] = part
    return out


def _as_tensor(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    """The array's memory; of an empty one, whose strides torch may not take for a row, that of another."""
    return torch.from_numpy(array) if array.size else like[:0]


def _are_few(sizes: Ints) -> bool:
    """Whether pieces are best copied one by one."""
    return sizes.size <= _FEW or bool(sizes.sum() >= _LONG * sizes.size)


def _in_turn(arrays: Sequence[npt.NDArray[Any]], sizes: Sequence[Sequence[int]]) -> list[npt.NDArray[Any]]:
    """The pieces of some arrays, peer after peer: ``sizes`` by array and peer."""
    by_array = [
        [array[stop - size : stop] for size, stop in zip(own, accumulate(own), strict=True)]
        for array, own in zip(arrays, sizes, strict=True)
    ]
    return [piece for of_peer in zip(*by_array, strict=True) for piece in of_peer]


def deal(flat: Tensor, sizes: Ints) -> list[Tensor]:
    """What :func:`interleave` made one: the parts."""
    if len(sizes) == 1:
        return [flat]
    return [take(flat, starts, own) for starts, own in zip(places_of(sizes), sizes, strict=True)]


def places_of(sizes: Ints) -> Ints:
    """Where :func:`interleave` puts each part's piece for each peer: ``[P, W]``."""
    by_peer = sizes.T.reshape(-1)
    return (by_peer.cumsum() - by_peer).reshape(sizes.shape[::-1]).T


def sums(values: Ints, bounds: Ints) -> Ints:
    """The sum of each run ``bounds[i] <= place < bounds[i + 1]``; runs may be empty."""
    total = np.zeros(len(values) + 1, dtype=np.int64)
    values.cumsum(out=total[1:])
    reached = total[bounds]
    found: Ints = reached[1:] - reached[:-1]
    return found


def order_of(keys: Tensor, num_keys: int) -> Tensor:
    """The places of keys ``0 <= key < num_keys`` in rising order, equal ones as they stand: ``[N]`` int64."""
    if not is_host(keys.device):
        return torch.argsort(keys, stable=True)
    own = keys.numpy()
    kind: Any = np.uint8 if num_keys <= _SHORTEST_KEYS else np.uint16
    order = np.argsort(own.astype(kind), kind="stable")  # by the lowest bits, which NumPy sorts by radix
    while num_keys > _SHORT_KEYS:  # then by the next
        own, num_keys = own >> 16, -(-num_keys >> 16)
        order = order[np.argsort(own.astype(np.uint16)[order], kind="stable")]
    return torch.from_numpy(order)


def counts_of(keys: Tensor, num_keys: int) -> Tensor:
    """How often each key occurs: ``[num_keys]`` int64."""
    if is_host(keys.device):
        return torch.bincount(keys, minlength=num_keys)
    # Counting on a device by bincount would make the host wait for the greatest key.
    counts = torch.zeros(num_keys, dtype=torch.int64, device=keys.device)
    return counts.scatter_add_(0, keys, torch.ones_like(keys))
