"""The search for the rows of keys on CUDA, in Triton: what :mod:`.numba_search` does, with as many ids at once.

Legend: R rows, N ids, S slots, more than R. Rows are put into slots by compare-and-swap. Which of two keys takes a slot
that both want depends on chance, but not which row each key has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwright_hash_embedding.hashing import mixed
from shardwright_plugins.kernel_parts.by_triton import launch, on_device
from shardwright_plugins.kernel_parts.machine import is_interpreted

_ITEMS = 128
"""Ids of a program, one for each thread of its four warps, which Triton starts by default."""

_mixed = mixed if is_interpreted() else triton.jit(mixed)  # the interpreter runs Python as it is


def find(slots: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Find the row of each id, or -1: ``[N]`` int64.

    Args:
        slots: ``[S]`` int32.
        keys: the key of each row, ``[R]``.
        ids: ``[N]`` int64.
    """
    rows = torch.empty_like(ids)
    with on_device(slots.device):
        launch(find_rows, len(ids), _ITEMS, slots, len(slots), keys, ids, len(ids), rows, ITEMS=_ITEMS)
    return rows


def put(slots: Tensor, keys: Tensor, rows: Tensor) -> None:
    """Put rows into slots, of which enough are empty.

    Args:
        slots: ``[S]`` int32.
        keys: the key of each row, ``[R]``.
        rows: different rows, of different keys: ``[N]`` int64.
    """
    with on_device(slots.device):
        launch(put_rows, len(rows), _ITEMS, slots, len(slots), keys, rows, len(rows), ITEMS=_ITEMS)


@triton.jit
def _first_slot(key, num_slots):  # type: ignore[no-untyped-def]
    # The upper half of the hash, times the slots, over 2 ** 31: ranks share ids out by the lower half.
    return ((_mixed(key) >> 33) & 0x7FFFFFFF) * num_slots >> 31


@triton.jit(do_not_specialize=["num_slots", "num_ids"], do_not_specialize_on_alignment=["ids"])
def find_rows(slots, num_slots, keys, ids, num_ids, rows, ITEMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Go from slot to slot until each id of the program is found, or has met an empty one."""
    at = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    is_id = at < num_ids
    key = tl.load(ids + at, mask=is_id, other=0)
    place = _first_slot(key, num_slots)
    row = tl.full([ITEMS], -1, tl.int32)
    is_sought = is_id
    while tl.max(is_sought.to(tl.int32)) > 0:
        row = ~tl.load(slots + place, mask=is_sought, other=~row)  # a lane that is through keeps its row
        is_sought = is_sought & (row >= 0)
        is_sought = is_sought & (tl.load(keys + row, mask=is_sought, other=0) != key)
        place = tl.where(place + 1 < num_slots, place + 1, 0)
    tl.store(rows + at, row.to(tl.int64), mask=is_id)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def put_rows(slots, num_slots, keys, rows, num_rows, ITEMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Go from slot to slot until each row of the program has taken an empty one."""
    at = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    is_left = at < num_rows
    row = tl.load(rows + at, mask=is_left, other=0)
    place = _first_slot(tl.load(keys + row, mask=is_left, other=0), num_slots)
    while tl.max(is_left.to(tl.int32)) > 0:
        # Compare-and-swap has no mask: no slot holds 1, so that a lane that is through changes none.
        before = tl.atomic_cas(slots + place, tl.where(is_left, 0, 1), ~row.to(tl.int32))
        is_left = is_left & (before != 0)
        place = tl.where(place + 1 < num_slots, place + 1, 0)
