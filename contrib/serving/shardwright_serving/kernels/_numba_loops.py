"""The compiled loops of the ``quant_numba`` kernel.

Legend: W sources, S slots, N ids, D columns of a block. *Cells* are (source, slot) pairs in the order the bags arrived,
cell ``source * S + slot``. Rows stand as `shardwright_serving.rows.quantized_rows` says, at any address.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from shardwright_plugins.kernel_parts.by_numba import AHEAD, compiled, prefetch
from shardwright_serving.kernels._numba_rows import (
    FP8,
    INT,
    INT2,
    INT4,
    INT8,
    LONG,
    sum_fp8,
    sum_fp16,
    sum_int2,
    sum_int4,
    sum_int8,
)

_CACHE_LINE = 64  # bytes
# Bytes that a core's own cache holds (half a MiB): fetching them ahead only takes time.
_NEAR = 1 << 19


@compiled
def _prefetch_row(address: int, size: int) -> None:
    for offset in range(0, size, _CACHE_LINE):
        prefetch(address + offset, 0)
    prefetch(address + size - 1, 0)  # rows begin anywhere in a line


def _read(kind: Any, numba_type: Any) -> Any:
    """The signature and the code of what reads a number at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()))
        return value if kind is LONG else builder.sext(value, LONG)

    return numba_type(types.int64), generate


@intrinsic
def _long_at(typing_context: Any, address: Any) -> Any:
    """The int64 at an address."""
    return _read(LONG, types.int64)


@intrinsic
def _int_at(typing_context: Any, address: Any) -> Any:
    """The int32 at an address."""
    return _read(INT, types.int64)


@compiled
def _look_up_bags(
    slot: Any,
    first: int,
    stop: int,
    ids: int,
    num_ids: int,
    weights: int,
    lengths: int,
    out: int,
    stride: int,
) -> int:
    """Sum the rows of each of some bags of a slot; returns the number of ids that they hold, or -1 for a wrong id.

    Args:
        slot: address of the slot's rows, bytes from row to row, ``D``, number of rows and precision.
        first: number of the first bag in its cell.
        stop: number of the bag after the last.
        ids: address of the first bag's ids.
        num_ids: number of ids from there to the end of the cell.
        weights: address of their weights, or 0.
        lengths: address of the cell's lengths, or 0 if each id is a bag of its own.
        out: address of the result of the cell's first bag.
        stride: float32 values from bag to bag in ``out``.
    """
    rows, size, dim, num_rows, kind = slot[0], slot[1], slot[2], slot[3], slot[4]
    is_far = num_rows * size > _NEAR
    if is_far:
        for position in range(min(AHEAD, num_ids)):
            _prefetch_row(rows + _long_at(ids + 8 * position) * size, size)
    at = 0
    for number in range(first, stop):
        count = _int_at(lengths + 4 * number) if lengths else 1
        if at + count > num_ids:
            return -1
        for position in range(at, at + count):
            if is_far and position + AHEAD < num_ids:
                _prefetch_row(rows + _long_at(ids + 8 * (position + AHEAD)) * size, size)
            if not 0 <= _long_at(ids + 8 * position) < num_rows:
                return -1
        own, factors = ids + 8 * at, weights + 4 * at if weights else 0
        place = out + 4 * number * stride
        if kind == INT8:
            sum_int8(rows, size, dim, own, factors, count, place)
        elif kind == INT4:
            sum_int4(rows, size, dim, own, factors, count, place)
        elif kind == INT2:
            sum_int2(rows, size, dim, own, factors, count, place)
        elif kind == FP8:
            sum_fp8(rows, size, dim, own, factors, count, place)
        else:
            sum_fp16(rows, size, dim, own, factors, count, place)
        at += count
    return at


@compiled
def look_up(
    slots: Any,
    share: Any,
    ids: Any,
    id_weights: Any,
    lengths: Any,
    bags: Any,
    first_id: Any,
    places: Any,
    out: int,
) -> None:
    """Sum the rows of each bag of some slots.

    Args:
        slots: address of each slot's rows, bytes from row to row, ``D``, number of rows and precision, ``[S, 5]``.
        share: first slot, slot after the last, number of the part of each slot's bags, and number of parts.
        ids: row numbers, ``[N]``.
        id_weights: weight of each id, ``[N]``, or empty.
        lengths: number of ids of each bag; empty if each id is a bag of its own.
        bags: number of bags of each cell, ``[W * S]``.
        first_id: first id of each cell.
        places: first bag of each cell, start of its result in ``out``, and step from bag to bag in ``out``,
            ``[W * S, 3]``.
        out: address of the flat float32 results; every element of these slots is written.

    Raises:
        IndexError: an id is no row of its block, or bags hold other ids than there are.
    """
    if first_id[-1] != ids.shape[0]:
        raise IndexError("bags hold another number of ids than there are")
    num_slots = slots.shape[0]
    for source in range(bags.shape[0] // num_slots):
        for slot in range(share[0], share[1]):
            cell = source * num_slots + slot
            bag, start, stride = places[cell]
            first, stop = bags[cell] * share[2] // share[3], bags[cell] * (share[2] + 1) // share[3]
            at = first_id[cell]
            for number in range(first):
                at += lengths[bag + number] if lengths.shape[0] else 1
            own = lengths.ctypes.data + 4 * bag if lengths.shape[0] else 0
            factors = id_weights.ctypes.data + 4 * at if id_weights.shape[0] else 0
            held = _look_up_bags(
                slots[slot], first, stop, ids.ctypes.data + 8 * at, first_id[cell + 1] - at, factors, own,
                out + 4 * start, stride,
            )  # fmt: skip
            if held < 0:
                raise IndexError("an id is no row of its table")


@compiled
def look_up_batch(
    slots: Any, ids: int, num_ids: int, weights: int, lengths: int, size: int, out: int, stride: int
) -> None:
    """Sum the rows of each bag of one source's batch, without what a call by arrays takes to prepare.

    Args:
        slots: table of the slots, as :func:`look_up` has it; the results of a slot's bags begin at the sum of ``D`` of
            those before.
        ids: address of the row numbers.
        num_ids: number of row numbers.
        weights: address of their weights, or 0.
        lengths: address of the int32 lengths of all bags, slot after slot.
        size: bags of each slot.
        out: address of the results, ``[size, stride]`` float32.
        stride: columns of all slots.

    Raises:
        IndexError: an id is no row of its block, or bags hold other ids than there are.
    """
    at, column = 0, 0
    for slot in range(slots.shape[0]):
        held = _look_up_bags(
            slots[slot], 0, size, ids + 8 * at, num_ids - at, weights + 4 * at if weights else 0,
            lengths + 4 * slot * size, out + 4 * column, stride,
        )  # fmt: skip
        if held < 0:
            raise IndexError("an id is no row of its table")
        at += held
        column += slots[slot, 2]
    if at != num_ids:
        raise IndexError("bags hold another number of ids than there are")
