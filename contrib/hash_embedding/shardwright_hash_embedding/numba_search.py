"""The search for the rows of keys on the CPU, compiled by Numba.

A hash table with open addressing. Legend: R rows, N ids, S slots, more than R. A slot holds ``~row``, or 0 if it is
empty. The row of a key is looked for from the slot that the key's hash says, slot after slot, as far as the first empty
one (linear probing: Knuth, The Art of Computer Programming 3, section 6.4). A slot of a row that has another key by now
is passed over, so that nothing is taken out of slots but by clearing them all.

:mod:`.triton_search` has the same functions for CUDA.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright_hash_embedding.hashing import mixed
from shardwright_plugins.kernel_parts.by_numba import compiled

Ints: TypeAlias = npt.NDArray[np.signedinteger]

_mixed = compiled(mixed)


def find(slots: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Find the row of each id, or -1: ``[N]`` int64.

    Args:
        slots: ``[S]`` int32.
        keys: the key of each row, ``[R]``.
        ids: ``[N]`` int64.
    """
    rows = torch.empty(len(ids), dtype=torch.int64)
    _find(slots.numpy(), keys.numpy(), ids.numpy(), rows.numpy())
    return rows


def put(slots: Tensor, keys: Tensor, rows: Tensor) -> None:
    """Put rows into slots, of which enough are empty.

    Args:
        slots: ``[S]`` int32.
        keys: the key of each row, ``[R]``.
        rows: different rows, of different keys: ``[N]`` int64.
    """
    _put(slots.numpy(), keys.numpy(), rows.numpy())


@compiled
def _first_slot(key: int, num_slots: int) -> int:
    # The upper half of the hash, times the slots, over 2 ** 31: ranks share ids out by the lower half.
    return ((_mixed(key) >> 33) & 0x7FFFFFFF) * num_slots >> 31


@compiled
def _next(place: int, num_slots: int) -> int:
    return place + 1 if place + 1 < num_slots else 0


@compiled
def _find(slots: Ints, keys: Ints, ids: Ints, rows: Ints) -> None:
    # First slots are read in a loop of their own, so that the processor waits for many of them at once.
    for number in range(len(ids)):
        rows[number] = ~slots[_first_slot(ids[number], len(slots))]
    for number in range(len(ids)):
        if rows[number] >= 0 and keys[rows[number]] != ids[number]:
            place = _next(_first_slot(ids[number], len(slots)), len(slots))
            while slots[place] < 0 and keys[~slots[place]] != ids[number]:
                place = _next(place, len(slots))
            rows[number] = ~slots[place]


@compiled
def _put(slots: Ints, keys: Ints, rows: Ints) -> None:
    for row in rows:
        place = _first_slot(keys[row], len(slots))
        while slots[place] < 0:
            place = _next(place, len(slots))
        slots[place] = ~row
