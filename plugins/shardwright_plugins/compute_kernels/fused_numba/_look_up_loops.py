"""The loops of a lookup: first ids of cells, places of results, and sums of bags.

Legend: W sources, S slots, N ids, D columns of a block. *Cells* are (source, slot) pairs in the order the bags arrived,
cell ``source * S + slot``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright_plugins.compute_kernels.fused_numba._row_loops import (
    AHEAD,
    compiled_loop,
    prefetch_row,
    sum_rows,
)

# float32 values that a core's own cache holds (half a MiB): fetching them ahead only takes time.
_NEAR = 1 << 17


@compiled_loop
def first_ids(lengths: Any, bags: Any, first: Any) -> None:
    """Compute the first id of each cell, and the number of all ids.

    Args:
        lengths: number of ids of each bag; empty if each id is a bag of its own.
        bags: number of bags of each cell, ``[W * S]``.
        first: receives them, ``[W * S + 1]``.
    """
    first[0], bag = 0, 0
    for cell in range(bags.shape[0]):
        count = bags[cell]
        if lengths.shape[0]:
            count = 0
            for _ in range(bags[cell]):
                count += lengths[bag]
                bag += 1
        first[cell + 1] = first[cell] + count


@compiled_loop
def places_in_a_row(counts: Any, dims: Any) -> Any:
    """The places of cells whose results stand one after the other, ``[bags, D]`` each; and the size of all.

    Args:
        counts: bags of each cell, ``[W, S]``.
        dims: columns of each slot, ``[S]``.

    Returns:
        ``[W * S, 3]``, see :func:`look_up`; and the number of float32 values.
    """
    num_slots = counts.shape[1]
    places = np.empty((counts.shape[0] * num_slots, 3), np.int64)
    bag, start = 0, 0
    for source in range(counts.shape[0]):
        for slot in range(num_slots):
            cell = source * num_slots + slot
            if counts[source, slot]:  # among many sources most have none, and their places are not read
                places[cell, 0], places[cell, 1], places[cell, 2] = bag, start, dims[slot]
            bag += counts[source, slot]
            start += counts[source, slot] * dims[slot]
    return places, start


@compiled_loop
def _ids_before(lengths: Any, bag: int, count: int) -> int:
    """The ids of the first bags of a cell."""
    if not lengths.shape[0]:
        return count
    num_ids = 0
    for number in range(count):
        num_ids += lengths[bag + number]
    return num_ids


@compiled_loop
def look_up(
    weights: int,
    slots: Any,
    ids: Any,
    id_weights: Any,
    lengths: Any,
    bags: Any,
    first_id: Any,
    places: Any,
    out: int,
    share: Any,
) -> None:
    """Sum the rows of each bag of some slots.

    Args:
        weights: address of the flat weights.
        slots: start of each slot's block in ``weights``, ``D``, and the block's number of rows, ``[S, 3]``.
        ids: row numbers, ``[N]``.
        id_weights: weight of each id, ``[N]``, or empty.
        lengths: number of ids of each bag; empty if each id is a bag of its own.
        bags: number of bags of each cell, ``[W * S]``.
        first_id: first id of each cell, made by :func:`first_ids`.
        places: first bag of each cell, start of its result in ``out``, and step from bag to bag in ``out``,
            ``[W * S, 3]``.
        out: address of the flat results; every element of these slots is written.
        share: first slot, slot after the last, number of the part of each slot's bags, and number of parts.

    Raises:
        IndexError: an id is no row of its block.
    """
    num_slots = slots.shape[0]
    for source in range(bags.shape[0] // num_slots):
        for slot in range(share[0], share[1]):
            cell = source * num_slots + slot
            if not bags[cell]:
                continue
            base, dim, num_rows = slots[slot]
            bag, start, stride = places[cell]
            first_bag = bags[cell] * share[2] // share[3]
            at, stop = first_id[cell] + _ids_before(lengths, bag, first_bag), first_id[cell + 1]
            if num_rows * dim > _NEAR:
                for position in range(at, min(at + AHEAD, stop)):
                    prefetch_row(weights, base + ids[position] * dim, dim)
            for number in range(first_bag, bags[cell] * (share[2] + 1) // share[3]):
                place = start + number * stride
                count = lengths[bag + number] if lengths.shape[0] else 1
                if number + AHEAD < bags[cell]:
                    prefetch_row(out, place + AHEAD * stride, dim)
                for position in range(at, at + count):
                    if num_rows * dim > _NEAR and position + AHEAD < stop:
                        prefetch_row(weights, base + ids[position + AHEAD] * dim, dim)
                    if not 0 <= ids[position] < num_rows:
                        raise IndexError("an id is no row of its table")
                factors = id_weights.ctypes.data + 4 * at if id_weights.shape[0] else 0
                sum_rows(weights, base, dim, dim, ids.ctypes.data + 8 * at, factors, count, out, place)
                at += count
