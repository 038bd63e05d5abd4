"""Triton kernels of ``fused_triton``: lookup, sorted keys, fused update, gradients of weights.

Legend: N ids, P ids in sorted order, S slots, K blocks, W sources, D columns of a block, C columns of its gradient.
A *cell* is a slot's bags from one source. A *run* is a stretch of sorted ids with one key. A *chunk* is a run, or that
piece of one which lies in a window of ``WINDOW`` sorted ids. Tiles are ``[ITEMS, UNROLL, COLUMNS]``: bags, runs or
windows; ids or partial sums that are read at once; columns of the widest block, a power of 2.

Tables of integers on the device, int64, one row each:

- cell ``[first bag, start of its results, elements from bag to bag]``,
- slot ``[start of the weights, D, first key, block]``,
- block ``[start of the weights, D, first key, C, first of the gradient's columns that are its own]``.

The order of each sum follows from the ids alone, so equal batches give equal bits. No kernel uses atomics.
"""

from __future__ import annotations

from contextlib import nullcontext
from threading import Lock
from typing import Any

import triton
import triton.language as tl

from shardwright_plugins.compute_kernels.fused_triton import is_interpreted

SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM = 0, 1, 2, 3
_CELL, _SLOT, _BLOCK = (tl.constexpr(width) for width in (3, 4, 5))
_IS_SGD, _IS_ADAGRAD, _IS_ROW_WISE = (tl.constexpr(code) for code in (SGD, ADAGRAD, ROW_WISE_ADAGRAD))


# Pointers into a batch's payload, which begins elsewhere in each step. They are read number by number, so that knowing
# that one is a multiple of 16 makes nothing faster, and each mix of those that are would be compiled anew.
FROM_PAYLOAD = ("cells", "ids", "id_weights", "lengths")


@triton.jit
def spans_of(bags, are_bags, ends, lengths, IS_SEQUENCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """First id and number of ids of each bag; of a sequence each id is a bag of its own."""
    if IS_SEQUENCE:
        counts = are_bags.to(tl.int64)
        firsts = bags
    else:
        counts = tl.load(lengths + bags, mask=are_bags, other=0).to(tl.int64)
        firsts = tl.load(ends + bags, mask=are_bags, other=0) - counts
    return firsts, counts


@triton.jit
def places_of(bags, are_bags, cells, cell_of_bag):  # type: ignore[no-untyped-def]
    """Cell of each bag, and the start of its result or gradient."""
    cell = tl.load(cell_of_bag + bags, mask=are_bags, other=0).to(tl.int64)
    first = tl.load(cells + cell * _CELL, mask=are_bags, other=0)
    start = tl.load(cells + cell * _CELL + 1, mask=are_bags, other=0)
    stride = tl.load(cells + cell * _CELL + 2, mask=are_bags, other=0)
    return cell, start + (bags - first) * stride


@triton.jit(do_not_specialize=["num_bags", "num_slots"], do_not_specialize_on_alignment=FROM_PAYLOAD)
def look_up(  # type: ignore[no-untyped-def]
    weights, slots, num_slots, cells, cell_of_bag, ids, id_weights, ends, lengths, out, num_bags,
    IS_SEQUENCE: tl.constexpr, IS_WEIGHTED: tl.constexpr, ALIGNED: tl.constexpr,
    ITEMS: tl.constexpr, UNROLL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the (weighted) rows of each bag in float32."""
    bags = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    are_bags = bags < num_bags
    cell, place = places_of(bags, are_bags, cells, cell_of_bag)
    slot = cell % num_slots
    # What the compiler is told of divisibility lets it read rows in vectors.
    base = tl.multiple_of(tl.load(slots + slot * _SLOT, mask=are_bags, other=0), ALIGNED)
    dim = tl.multiple_of(tl.load(slots + slot * _SLOT + 1, mask=are_bags, other=0), ALIGNED)
    firsts, counts = spans_of(bags, are_bags, ends, lengths, IS_SEQUENCE)
    columns = tl.arange(0, COLUMNS)
    # As many sums as ids are read at once: they meet after the loop, which so needs no word between warps.
    sums = tl.zeros([ITEMS, UNROLL, COLUMNS], tl.float32)
    longest = tl.max(counts)
    done = longest * 0
    while done < longest:
        number = done + tl.arange(0, UNROLL)
        is_id = number[None, :] < counts[:, None]
        at = firsts[:, None] + number[None, :]
        row = tl.load(ids + at, mask=is_id, other=0)
        start = tl.multiple_of(base[:, None] + row * dim[:, None], [ALIGNED, ALIGNED])
        is_value = is_id[:, :, None] & (columns[None, None, :] < dim[:, None, None])
        values = tl.load(weights + start[:, :, None] + columns[None, None, :], mask=is_value, other=0.0)
        values = values.to(tl.float32)
        if IS_WEIGHTED:
            values *= tl.load(id_weights + at, mask=is_id, other=0.0)[:, :, None]
        sums += values
        done += UNROLL
    total = tl.sum(sums, axis=1)
    place = tl.multiple_of(place, ALIGNED)
    is_result = are_bags[:, None] & (columns[None, :] < dim[:, None])
    tl.store(out + place[:, None] + columns[None, :], total, mask=is_result)


@triton.jit(do_not_specialize=["num_bags", "num_slots"], do_not_specialize_on_alignment=FROM_PAYLOAD)
def list_ids(  # type: ignore[no-untyped-def]
    slots, num_slots, cells, cell_of_bag, ids, ends, lengths, keys, places, blocks_of_ids, num_bags,
    IS_SEQUENCE: tl.constexpr, ITEMS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write each id's key, the start of its bag's gradient, and its block."""
    bags = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    are_bags = bags < num_bags
    cell, place = places_of(bags, are_bags, cells, cell_of_bag)
    slot = cell % num_slots
    first_key = tl.load(slots + slot * _SLOT + 2, mask=are_bags, other=0)
    block = tl.load(slots + slot * _SLOT + 3, mask=are_bags, other=0)
    firsts, counts = spans_of(bags, are_bags, ends, lengths, IS_SEQUENCE)
    longest = tl.max(counts)
    done = longest * 0
    while done < longest:
        number = done + tl.arange(0, UNROLL)
        is_id = number[None, :] < counts[:, None]
        at = firsts[:, None] + number[None, :]
        key = first_key[:, None] + tl.load(ids + at, mask=is_id, other=0)
        tl.store(keys + at, key.to(keys.dtype.element_ty), mask=is_id)
        tl.store(places + at, tl.broadcast_to(place[:, None], [ITEMS, UNROLL]), mask=is_id)
        tl.store(
            blocks_of_ids + at, tl.broadcast_to(block[:, None], [ITEMS, UNROLL]).to(tl.int32), mask=is_id
        )
        done += UNROLL


@triton.jit(do_not_specialize=["num_ids"])
def sort_few(  # type: ignore[no-untyped-def]
    keys, sorted_keys, order, num_ids, ITEMS: tl.constexpr, OTHERS: tl.constexpr
):
    """Sort keys stably by counting, for each, those that come before it: one launch, where a sort takes several."""
    at = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    is_id = at < num_ids
    key = tl.load(keys + at, mask=is_id, other=0)
    place = tl.zeros([ITEMS], tl.int64)
    done = num_ids * 0
    while done < num_ids:
        others = done + tl.arange(0, OTHERS)
        is_there = others < num_ids
        other = tl.load(keys + others, mask=is_there, other=0)
        is_equal = (other[None, :] == key[:, None]) & (others[None, :] < at[:, None])
        comes_before = (other[None, :] < key[:, None]) | is_equal
        place += tl.sum((comes_before & is_there[None, :]).to(tl.int64), axis=1)
        done += OTHERS
    tl.store(sorted_keys + place, key, mask=is_id)
    tl.store(order + place, at, mask=is_id)


@triton.jit
def _rounded(values, like, IS_STOCHASTIC: tl.constexpr, seed, offsets):  # type: ignore[no-untyped-def]
    """Values in the weights' type: the nearest ones, or one of the two neighbours so that the mean is the value."""
    rounded = values.to(like)
    if IS_STOCHASTIC:
        # The neighbour on the value's other side: halves are sign and magnitude, so one bit more is further from zero.
        bits = rounded.to(tl.int16, bitcast=True)
        nearest = rounded.to(tl.float32)
        step = tl.where(tl.abs(values) > tl.abs(nearest), 1, -1).to(tl.int16)
        neighbour = (bits + step).to(like, bitcast=True).to(tl.float32)
        # Taken with the probability of the value's distance over that of the two: Gupta et al. 2015 (arXiv:1502.02551).
        is_taken = tl.rand(seed, offsets) * tl.abs(neighbour - nearest) < tl.abs(values - nearest)
        rounded = tl.where(is_taken & (values != nearest), neighbour, nearest).to(like)
    return rounded


@triton.jit
def _update_rows(  # type: ignore[no-untyped-def]
    gradient, keys, blocks_of_rows, are_rows, blocks, weights, first, second,
    learning_rate, eps, beta1, beta2, correction1, correction2, seed,
    OPTIMIZER: tl.constexpr, IS_STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Apply an optimizer to rows ``[ITEMS]``, given their gradients ``[ITEMS, COLUMNS]``, each row once."""
    block = blocks + blocks_of_rows.to(tl.int64) * _BLOCK
    base = tl.multiple_of(tl.load(block, mask=are_rows, other=0), ALIGNED)
    dim = tl.multiple_of(tl.load(block + 1, mask=are_rows, other=0), ALIGNED)
    first_key = tl.load(block + 2, mask=are_rows, other=0)
    width = tl.load(block + 3, mask=are_rows, other=1)
    offset = tl.multiple_of(tl.load(block + 4, mask=are_rows, other=0), ALIGNED)
    columns = tl.arange(0, COLUMNS)
    # Columns count those of the gradient: the block's own are some of them where a row-wise optimizer needs all.
    own = columns[None, :] - offset[:, None]
    is_value = are_rows[:, None] & (own >= 0) & (own < dim[:, None])
    start = tl.multiple_of(base + (keys.to(tl.int64) - first_key) * dim, ALIGNED)
    at = start[:, None] + own
    if OPTIMIZER == _IS_SGD:
        change = gradient * learning_rate
    elif OPTIMIZER == _IS_ADAGRAD:
        # sum += g^2; w -= lr * g / (sqrt(sum) + eps): Duchi et al. 2011
        total = tl.load(first + at, mask=is_value, other=1.0) + gradient * gradient
        tl.store(first + at, total, mask=is_value)
        change = gradient * learning_rate / (tl.sqrt(total) + eps)
    elif OPTIMIZER == _IS_ROW_WISE:
        # One sum a row, of the mean of g^2 over all columns of the table: Naumov et al. 2019 (arXiv:1906.00091)
        total = tl.load(first + keys, mask=are_rows, other=1.0) + tl.sum(gradient * gradient, axis=1) / width
        tl.store(first + keys, total, mask=are_rows)
        change = gradient * (learning_rate / (tl.sqrt(total) + eps))[:, None]
    else:
        # Kingma & Ba 2014, on rows with a gradient only; the corrections are 1 - beta^step.
        average = tl.load(first + at, mask=is_value, other=0.0)
        average += (gradient - average) * (1 - beta1)
        square = tl.load(second + at, mask=is_value, other=1.0)
        square = square * beta2 + gradient * gradient * (1 - beta2)
        tl.store(first + at, average, mask=is_value)
        tl.store(second + at, square, mask=is_value)
        change = average / correction1 * learning_rate / (tl.sqrt(square / correction2) + eps)
    values = tl.load(weights + at, mask=is_value, other=0.0).to(tl.float32) - change
    tl.store(weights + at, _rounded(values, weights.dtype.element_ty, IS_STOCHASTIC, seed, at), mask=is_value)


@triton.jit(do_not_specialize=["num_ids", "seed"], do_not_specialize_on_alignment=FROM_PAYLOAD)
def update_chunks(  # type: ignore[no-untyped-def]
    keys, order, places, blocks_of_ids, id_weights, gradients, scale, partial, num_ids,
    blocks, weights, first, second, learning_rate, eps, beta1, beta2, correction1, correction2, seed,
    OPTIMIZER: tl.constexpr, IS_STOCHASTIC: tl.constexpr, IS_WEIGHTED: tl.constexpr, ALIGNED: tl.constexpr,
    WINDOW: tl.constexpr, ITEMS: tl.constexpr, UNROLL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the gradients of each chunk; update the row if that is its whole run, else keep the partial sum.

    A program looks at ``ITEMS`` sorted ids. A chunk begins where the key changes, as the boundary mask says, and at
    each window. So a window has at most two partial sums: of the run that reaches into it, and of the one that leaves
    it.
    """
    at = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    is_id = at < num_ids
    key = tl.load(keys + at, mask=is_id, other=-1)
    begins_run = is_id & ((at == 0) | (tl.load(keys + at - 1, mask=is_id & (at > 0), other=-1) != key))
    begins = begins_run | (is_id & (at % WINDOW == 0))
    window_end = (at // WINDOW + 1) * WINDOW
    own = tl.load(order + at, mask=begins, other=0)
    block = tl.load(blocks_of_ids + own, mask=begins, other=0)
    width = tl.multiple_of(tl.load(blocks + block.to(tl.int64) * _BLOCK + 3, mask=begins, other=0), ALIGNED)
    columns = tl.arange(0, COLUMNS)
    sums = tl.zeros([ITEMS, UNROLL, COLUMNS], tl.float32)
    is_last = (tl.arange(0, UNROLL) == UNROLL - 1)[None, :]
    done = num_ids * 0
    goes_on = 1
    while goes_on > 0:
        next_ids = at[:, None] + done + tl.arange(0, UNROLL)[None, :]
        in_window = begins[:, None] & (next_ids < window_end[:, None]) & (next_ids < num_ids)
        is_of_run = in_window & (tl.load(keys + next_ids, mask=in_window, other=-1) == key[:, None])
        source = tl.load(order + next_ids, mask=is_of_run, other=0)
        start = tl.load(places + source, mask=is_of_run, other=0)
        start = tl.multiple_of(start, [ALIGNED, ALIGNED])
        is_value = is_of_run[:, :, None] & (columns[None, None, :] < width[:, None, None])
        values = tl.load(gradients + start[:, :, None] + columns[None, None, :], mask=is_value, other=0.0)
        if IS_WEIGHTED:
            values *= tl.load(id_weights + source, mask=is_of_run, other=0.0)[:, :, None]
        sums += values
        done += UNROLL
        goes_on = tl.max((is_of_run & is_last).to(tl.int32))
    total = tl.sum(sums, axis=1) * scale
    follower = tl.load(keys + window_end, mask=begins & (window_end < num_ids), other=-1)
    is_whole = begins_run & (follower != key)
    is_part = begins & (is_whole == 0)
    place = (at // WINDOW) * 2 + (at % WINDOW != 0).to(tl.int64)
    tl.store(
        partial + place[:, None] * COLUMNS + columns[None, :],
        total,
        mask=tl.broadcast_to(is_part[:, None], [ITEMS, COLUMNS]),
    )
    _update_rows(
        total, key, block, is_whole, blocks, weights, first, second, learning_rate, eps, beta1, beta2, correction1,
        correction2, seed, OPTIMIZER, IS_STOCHASTIC, ALIGNED, COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_ids", "seed"])
def update_long_runs(  # type: ignore[no-untyped-def]
    keys, order, blocks_of_ids, partial, num_ids,
    blocks, weights, first, second, learning_rate, eps, beta1, beta2, correction1, correction2, seed,
    OPTIMIZER: tl.constexpr, IS_STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    WINDOW: tl.constexpr, ITEMS: tl.constexpr, UNROLL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of each run that leaves the window it begins in, and update its row.

    At most one run leaves a window, and one program looks at ``ITEMS`` windows.
    """
    window = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    begin, end = window * WINDOW, (window + 1) * WINDOW
    has_next = end < num_ids
    key = tl.load(keys + end - 1, mask=has_next, other=-1)
    leaves = has_next & (tl.load(keys + end, mask=has_next, other=-2) == key)
    fills = leaves & (tl.load(keys + begin, mask=leaves, other=-1) == key)
    reaches_in = fills & (tl.load(keys + begin - 1, mask=fills & (window > 0), other=-1) == key)
    begins = leaves & (reaches_in == 0)
    block = tl.load(blocks_of_ids + tl.load(order + end - 1, mask=begins, other=0), mask=begins, other=0)
    columns = tl.arange(0, COLUMNS)
    # The partial sum of the window it begins in, then those of the windows it reaches into.
    place = window * 2 + (fills == 0).to(tl.int64)
    total = tl.load(
        partial + place[:, None] * COLUMNS + columns[None, :],
        mask=tl.broadcast_to(begins[:, None], [ITEMS, COLUMNS]),
        other=0.0,
    )
    sums = tl.zeros([ITEMS, UNROLL, COLUMNS], tl.float32)
    is_last = (tl.arange(0, UNROLL) == UNROLL - 1)[None, :]
    done = num_ids * 0 + 1
    goes_on = tl.max(begins.to(tl.int32))
    while goes_on > 0:
        further = window[:, None] + done + tl.arange(0, UNROLL)[None, :]
        is_there = begins[:, None] & (further * WINDOW < num_ids)
        is_of_run = is_there & (tl.load(keys + further * WINDOW, mask=is_there, other=-1) == key[:, None])
        values = tl.load(
            partial + further[:, :, None] * 2 * COLUMNS + columns[None, None, :],
            mask=tl.broadcast_to(is_of_run[:, :, None], [ITEMS, UNROLL, COLUMNS]),
            other=0.0,
        )
        sums += values
        done += UNROLL
        goes_on = tl.max((is_of_run & is_last).to(tl.int32))
    total += tl.sum(sums, axis=1)
    _update_rows(
        total, key, block, begins, blocks, weights, first, second, learning_rate, eps, beta1, beta2, correction1,
        correction2, seed, OPTIMIZER, IS_STOCHASTIC, ALIGNED, COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_ids"])
def weight_gradients(  # type: ignore[no-untyped-def]
    weights, blocks, keys, places, blocks_of_ids, gradients, out, num_ids,
    ALIGNED: tl.constexpr, ITEMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradient of each id's weight: the inner product of its row and its bag's gradient."""
    at = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    is_id = at < num_ids
    block = blocks + tl.load(blocks_of_ids + at, mask=is_id, other=0).to(tl.int64) * _BLOCK
    base = tl.multiple_of(tl.load(block, mask=is_id, other=0), ALIGNED)
    dim = tl.multiple_of(tl.load(block + 1, mask=is_id, other=0), ALIGNED)
    first_key = tl.load(block + 2, mask=is_id, other=0)
    offset = tl.multiple_of(tl.load(block + 4, mask=is_id, other=0), ALIGNED)
    key = tl.load(keys + at, mask=is_id, other=0).to(tl.int64)
    place = tl.multiple_of(tl.load(places + at, mask=is_id, other=0), ALIGNED)
    columns = tl.arange(0, COLUMNS)
    is_value = is_id[:, None] & (columns[None, :] < dim[:, None])
    row = tl.load(
        weights + (base + (key - first_key) * dim)[:, None] + columns[None, :], mask=is_value, other=0.0
    )
    gradient = tl.load(gradients + (place + offset)[:, None] + columns[None, :], mask=is_value, other=0.0)
    tl.store(out + at, tl.sum(row.to(tl.float32) * gradient, axis=1), mask=is_id)


_INTERPRETER = Lock()  # it changes the language's own module while a kernel runs


def launch(kernel: Any, num_items: int, items: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel over items, so many a program; nothing where there are none."""
    if num_items:
        with _INTERPRETER if is_interpreted() else nullcontext():
            kernel[(-(-num_items // items),)](*arguments, **constants)
