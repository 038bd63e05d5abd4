"""Many pieces of flat tensors moved in a few calls, however many pieces there are.

A piece of a flat tensor has a start and a size. Where pieces are long they are copied one by one, which is as quick as
memory; where they are short, as among thousands of ranks, by an index of every element.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwright.planning.blocks import Ints

_LONG = 64  # elements: from there on copying a piece by itself takes less than an index of its elements
_SHORT_KEYS = 1 << 16  # what NumPy sorts by radix


def starts_of(sizes: Ints) -> Ints:
    """Where each of pieces that stand one after the other begins: ``[n]``."""
    stops: Ints = np.cumsum(sizes)
    return stops - sizes


def repeated(values: Ints, counts: Ints, device: torch.device) -> Tensor:
    """Each value as often as its count says: ``[sum of counts]`` int64."""
    if device.type == "cpu":
        return torch.from_numpy(np.repeat(values, counts))
    own, times = (torch.from_numpy(numbers).to(device, non_blocking=True) for numbers in (values, counts))
    return own.repeat_interleave(times, output_size=int(counts.sum()))


def numbered(counts: Tensor, total: int) -> Tensor:
    """Number pieces from 0, each number as often as the piece has elements: ``[total]`` int64.

    Args:
        counts: elements of each piece, in the memory of the device.
        total: their sum.
    """
    numbers = torch.arange(len(counts), device=counts.device)
    if counts.device.type == "cpu":
        return torch.from_numpy(np.repeat(numbers.numpy(), counts.numpy()))
    return numbers.repeat_interleave(counts, output_size=total)


def index_of(starts: Ints, sizes: Ints, device: torch.device) -> Tensor:
    """The places of all elements of pieces, piece after piece: ``[sum of sizes]`` int64."""
    places = repeated(starts - starts_of(sizes), sizes, device)
    return places.add_(torch.arange(len(places), device=device))


def take(values: Tensor, starts: Ints, sizes: Ints) -> Tensor:
    """Pieces of a flat tensor, one after the other; not copied if that is how they stand."""
    total = int(sizes.sum())
    used = np.flatnonzero(sizes) if total else sizes[:0]
    if len(used) < len(sizes):
        starts, sizes = starts[used], sizes[used]
    if not len(sizes):
        return values[:0]
    if np.array_equal(starts[1:], starts[:-1] + sizes[:-1]):
        return values[int(starts[0]) : int(starts[0]) + total]
    if total < _LONG * len(sizes):
        return values.index_select(0, index_of(starts, sizes, values.device))
    return _joined(values, starts, sizes)


def _joined(values: Tensor, starts: Ints, sizes: Ints) -> Tensor:
    """The pieces, copied one by one."""
    spans = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    if values.device.type == "cpu":
        own = values.numpy()
        return torch.from_numpy(np.concatenate([own[start:stop] for start, stop in spans]))
    return torch.cat([values[start:stop] for start, stop in spans])


def interleave(parts: Sequence[Tensor], sizes: Ints) -> Tensor:
    """Flat tensors of one dtype, each a piece for every peer, as one: peer after peer the pieces of all.

    Args:
        parts: ``P`` tensors.
        sizes: elements of each one's piece for each peer, ``[P, W]``.
    """
    used = [index for index, part in enumerate(parts) if part.numel()]
    if len(used) <= 1:
        return parts[used[0]] if used else parts[0]
    parts, sizes = [parts[index] for index in used], sizes[used]
    begins = np.stack([starts_of(own) for own in sizes])
    if parts[0].device.type == "cpu" and sizes.sum() >= _LONG * sizes.size:
        arrays = [part.numpy() for part in parts]
        spans = zip(begins.T.tolist(), (begins + sizes).T.tolist(), strict=True)
        return torch.from_numpy(
            np.concatenate(
                [array[start:stop] for own in spans for array, start, stop in zip(arrays, *own, strict=True)]
            )
        )
    out = parts[0].new_empty(int(sizes.sum()))
    for part, places, own in zip(parts, places_of(sizes), sizes, strict=True):
        out[index_of(places, own, out.device)] = part
    return out


def deal(flat: Tensor, sizes: Ints) -> list[Tensor]:
    """What :func:`interleave` made one: the parts."""
    return [take(flat, starts, own) for starts, own in zip(places_of(sizes), sizes, strict=True)]


def places_of(sizes: Ints) -> Ints:
    """Where :func:`interleave` puts each part's piece for each peer: ``[P, W]``."""
    by_peer = np.ascontiguousarray(sizes.T)
    return starts_of(by_peer.reshape(-1)).reshape(by_peer.shape).T


def sums(values: Ints, bounds: Ints) -> Ints:
    """The sum of each run ``bounds[i] <= place < bounds[i + 1]``; runs may be empty."""
    total = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=total[1:])
    return np.diff(total[bounds])


def order_of(keys: Tensor, num_keys: int) -> Tensor:
    """The places of keys ``0 <= key < num_keys`` in rising order, equal ones as they stand: ``[N]`` int64."""
    if keys.device.type != "cpu":
        return torch.argsort(keys, stable=True)
    own = keys.numpy()
    order = np.argsort(
        own.astype(np.uint16), kind="stable"
    )  # by the lowest 16 bits, which NumPy sorts by radix
    while num_keys > _SHORT_KEYS:  # then by the next
        own, num_keys = own >> 16, -(-num_keys >> 16)
        order = order[np.argsort(own.astype(np.uint16)[order], kind="stable")]
    return torch.from_numpy(order)


def counts_of(keys: Tensor, num_keys: int) -> Tensor:
    """How often each key occurs: ``[num_keys]`` int64."""
    if keys.device.type == "cpu":
        return torch.bincount(keys, minlength=num_keys)
    # Counting on a device by bincount would make the host wait for the greatest key.
    counts = torch.zeros(num_keys, dtype=torch.int64, device=keys.device)
    return counts.scatter_add_(0, keys, torch.ones_like(keys))
