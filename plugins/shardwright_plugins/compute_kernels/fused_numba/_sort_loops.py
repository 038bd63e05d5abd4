"""The loops that sort ids by rows.

Equal ids are found by sorting (radix, least significant digit first: Knuth, The Art of Computer Programming 3, section
5.2.5), which is stable: a row's gradients are added in the order of its ids, however many threads there are, so that
the same batch gives the same bits. The sort needs ids alone, so that it can be done before there are gradients.

Legend: W sources, S slots, K blocks, N ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright_plugins.compute_kernels.fused_numba._row_loops import (
    compiled_loop,
)

_DIGIT_BITS = 11  # of a radix sort, at most: counts of all digits stay in the first cache


_ROW_SHIFT = 32  # of a sort key: the row above, the number of the id below


@compiled_loop
def _hash(row: int) -> Any:
    """32 bits, by Fibonacci hashing: 2^64 divided by the golden ratio."""
    return (np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)


@compiled_loop
def _part_of(row: int, num_parts: int) -> Any:
    """The part that a row is in, by the upper bits of its hash."""
    return np.int64((_hash(row) * np.uint64(num_parts)) >> np.uint64(32))


@compiled_loop
def _list_ids(
    block_slots: Any,
    num_slots: int,
    sources: Any,
    part: int,
    num_parts: int,
    ids: Any,
    lengths: Any,
    bags: Any,
    first_id: Any,
    places: Any,
    keys: Any,
    position_of: Any,
    gradient_of: Any,
) -> Any:
    """The ids of a part of a block's rows, in the order of their cells: keys, positions, and where gradients begin.

    Returns:
        How many there are, and the highest row.
    """
    number, highest = 0, 0
    for source in sources:
        for slot in range(block_slots[0], block_slots[1]):
            cell = source * num_slots + slot
            if not bags[cell]:
                continue
            bag, start, stride = places[cell]
            position = first_id[cell]
            for _ in range(bags[cell]):
                count = lengths[bag] if lengths.shape[0] else 1
                for _ in range(count):
                    row = ids[position]
                    keys[number] = row << _ROW_SHIFT | number
                    position_of[number] = position
                    gradient_of[number] = start
                    highest = max(highest, row)
                    # No branch: which rows are whose is nothing that a processor could learn.
                    number += num_parts == 1 or _part_of(row, num_parts) == part
                    position += 1
                bag += 1
                start += stride
    return number, highest


@compiled_loop
def _num_bits(number: int) -> int:
    """Bits that a number has."""
    bits = 0
    while number >> bits:
        bits += 1
    return bits


@compiled_loop
def _sort_keys(keys: Any, room: Any, count: int, highest: int, ends: Any) -> Any:
    """Sort keys by their rows, equal rows as they stand.

    Args:
        keys: the first ``count`` are sorted; changed.
        room: memory for as many keys; changed.
        count: number of keys.
        highest: highest row among the keys.
        ends: memory for the counts of all digits.

    Returns:
        ``keys`` or ``room``, whichever has them in the end.
    """
    # Digits have as many values as there are keys, since clearing their counts is work, too.
    widest = max(4, min(_DIGIT_BITS, _num_bits(count)))
    bits = _num_bits(highest)
    num_digits = (bits + widest - 1) // widest
    width = (bits + num_digits - 1) // max(num_digits, 1)
    for digit in range(num_digits):
        shift, mask = _ROW_SHIFT + digit * width, (1 << width) - 1
        ends[: mask + 1] = 0
        for number in range(count):
            ends[(keys[number] >> shift) & mask] += 1
        reached = 0
        for value in range(mask + 1):
            own = ends[value]
            ends[value] = reached
            reached += own
        for number in range(count):
            value = (keys[number] >> shift) & mask
            room[ends[value]] = keys[number]
            ends[value] += 1
        keys, room = room, keys
    return keys


@compiled_loop
def sort_ids(
    blocks: Any,
    share: Any,
    num_slots: int,
    ids: Any,
    id_weights: Any,
    lengths: Any,
    bags: Any,
    first_id: Any,
    places: Any,
    ends: Any,
    rows: Any,
    starts: Any,
    factors: Any,
) -> None:
    """Sort the ids of some blocks by rows.

    Args:
        blocks: places of the blocks, ``[K, 7]``, see :func:`update`.
        share: first block, block after the last, number of the part of each block's rows, and number of parts.
        num_slots: ``S``.
        ids: row numbers, ``[N]``.
        id_weights: weight of each id, ``[N]``, or empty.
        lengths: number of ids of each bag; empty if each id is a bag of its own.
        bags: number of bags of each cell, ``[W * S]``.
        first_id: first id of each cell, made by :func:`first_ids`.
        places: places of the cells in the gradients, ``[W * S, 3]``, see :func:`look_up`.
        ends: receives, for each block of the share, the number of ids up to its end.
        rows: receives the row of each id, block after block, rising; int32.
        starts: receives the start of each id's gradient.
        factors: receives the weight of each id, if ``id_weights`` has any.
    """
    # Room for all ids in each block: pages that no block writes take no memory.
    most = first_id[first_id.shape[0] - 1]
    # Among many sources most have no ids; the blocks do not each look for those that do.
    edges = first_id[::num_slots]
    sources = np.flatnonzero(edges[1:] > edges[:-1])
    keys, room = np.empty(most, np.int64), np.empty(most, np.int64)
    position_of, gradient_of = np.empty(most, np.int64), np.empty(most, np.int64)
    counts = np.empty(1 << _DIGIT_BITS, np.int64)
    first = 0
    for block in range(share[0], share[1]):
        count, highest = _list_ids(
            blocks[block], num_slots, sources, share[2], share[3], ids, lengths, bags, first_id, places, keys,
            position_of, gradient_of,
        )  # fmt: skip
        by_row = _sort_keys(keys, room, count, highest, counts)
        for index in range(count):
            number = by_row[index] & ((1 << _ROW_SHIFT) - 1)
            rows[first + index] = by_row[index] >> _ROW_SHIFT
            starts[first + index] = gradient_of[number]
            if id_weights.shape[0]:
                factors[first + index] = id_weights[position_of[number]]
        first += count
        ends[block - share[0]] = first
