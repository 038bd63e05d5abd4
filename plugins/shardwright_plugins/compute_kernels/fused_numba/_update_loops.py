"""The loops that update rows: by gradients of bags sorted by rows, or by the sums of all rows' gradients.

Legend: S slots, K blocks, N ids, D columns of a block, C columns of a slot's gradient. Weights of all blocks stand in
one flat array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright_plugins.compute_kernels.fused_numba._row_loops import (
    AHEAD,
    add_row,
    add_to_rows,
    clear,
    compiled_loop,
    prefetch,
    prefetch_row,
    read,
    set_to_sum,
    subtract,
    sum_rows,
    write,
)

SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM = range(4)


@compiled_loop
def _update_row(
    optimizer: int,
    numbers: Any,
    weights: int,
    row: int,
    dim: int,
    total: int,
    scale: Any,
    own: int,
    offset: int,
    first: int,
    second: int,
    number: int,
) -> None:
    """Advance the state of one row and subtract its update.

    Args:
        optimizer: number of the optimizer, see :func:`update`.
        numbers: hyperparameters, see :func:`update`.
        weights: address of the flat weights, changed.
        row: start of the row in ``weights``.
        dim: ``D``.
        total: address of the row's gradient, ``C`` columns.
        scale: factor of the gradient.
        own: ``C``.
        offset: first of the row's own columns among those of the gradient.
        first: address of the flat first state, changed.
        second: address of the flat second state, changed.
        number: number of the row among those of all blocks, where its state of one value a row is.
    """
    rate, eps = numbers[0], numbers[1]
    state = number if optimizer == ROW_WISE_ADAGRAD else row
    if optimizer == SGD:
        add_row(total, offset, dim, -rate * scale, weights, row)
    elif optimizer == ADAGRAD:
        for column in range(dim):
            value = scale * read(total, offset + column)
            squares = read(first, state + column) + value * value
            write(first, state + column, squares)
            subtract(weights, row + column, rate * value / (np.sqrt(squares) + eps))
    elif optimizer == ROW_WISE_ADAGRAD:
        squares = np.float32(0)
        for column in range(own):
            squares += read(total, column) * read(total, column)
        squares = read(first, state) + scale * scale * squares / np.float32(own)
        write(first, state, squares)
        step = scale * rate / (np.sqrt(squares) + eps)
        add_row(total, offset, dim, -step, weights, row)
    else:
        rate /= numbers[5]
        for column in range(dim):
            value = scale * read(total, offset + column)
            average = read(first, state + column)
            average += numbers[2] * (value - average)
            squares = numbers[3] * read(second, state + column) + numbers[4] * value * value
            write(first, state + column, average)
            write(second, state + column, squares)
            subtract(weights, row + column, rate * average / (np.sqrt(squares / numbers[6]) + eps))


@compiled_loop
def _prefetch_state(optimizer: int, first: int, row: int, dim: int, number: int) -> None:
    """Fetch the first state of a row into a cache; the arguments are those of :func:`_update_row`."""
    if optimizer == ROW_WISE_ADAGRAD:
        prefetch(first, number)
    elif optimizer != SGD:
        prefetch_row(first, row, dim)


@compiled_loop
def update(
    optimizer: int,
    numbers: Any,
    weights: int,
    first: int,
    second: int,
    blocks: Any,
    gradients: int,
    scale: Any,
    share: Any,
    ends: Any,
    rows: Any,
    starts: Any,
    factors: Any,
    room: Any,
) -> None:
    """Update every row of some blocks that a bag had, once.

    Args:
        optimizer: :data:`SGD`, :data:`ADAGRAD`, :data:`ROW_WISE_ADAGRAD` or :data:`ADAM`.
        numbers: float32 ``[7]``: learning rate, eps, ``1 - beta1``, ``beta2``, ``1 - beta2``, and the bias corrections
            ``1 - beta1^step`` and ``1 - beta2^step``.
        weights: address of the flat weights, changed.
        first: address of the flat first state, changed: one value a row for row-wise optimizers, else as many as
            ``weights``.
        second: address of the flat second state, changed, of the same size.
        blocks: first slot of each block, slot after its last, start in ``weights``, ``D``, ``C``, first of its columns
            among those of the gradient, and first row among all blocks' rows, ``[K, 7]``.
        gradients: address of the flat gradients.
        scale: factor of the gradients.
        share: first block, block after the last, number of the part of each block's rows, and number of parts.
        ends: number of ids up to the end of each block of the share, written by :func:`sort_ids`.
        rows: row of each id, rising in each block, written by :func:`sort_ids`.
        starts: start of each id's gradient in ``gradients``, written by :func:`sort_ids`.
        factors: weight of each id, written by :func:`sort_ids`; empty if all are 1.
        room: memory for the sum of a row's gradients, as wide as the widest ``C``.
    """
    index, total = 0, room.ctypes.data
    for block in range(share[0], share[1]):
        base, dim, own = blocks[block, 2], blocks[block, 3], blocks[block, 4]
        offset, first_row = blocks[block, 5], blocks[block, 6]
        stop, ahead = ends[block - share[0]], index
        while index < stop:
            number = rows[index]
            last = index + 1
            while last < stop and rows[last] == number:
                last += 1
            while ahead < min(last + AHEAD, stop):
                soon = rows[ahead]
                prefetch_row(gradients, starts[ahead], own)
                prefetch_row(weights, base + soon * dim, dim)
                _prefetch_state(optimizer, first, base + soon * dim, dim, first_row + soon)
                ahead += 1
            weighted = factors.ctypes.data + 4 * index if factors.shape[0] else 0
            sum_rows(gradients, 0, 1, own, starts.ctypes.data + 8 * index, weighted, last - index, total, 0)
            row = base + number * dim
            _update_row(
                optimizer, numbers, weights, row, dim, total, scale, own, offset, first, second,
                first_row + number,
            )  # fmt: skip
            index = last


@compiled_loop
def add_up_rows(
    places: Any,
    blocks: Any,
    wanted: Any,
    ids: Any,
    id_weights: Any,
    lengths: Any,
    bags: Any,
    first_id: Any,
    starts: Any,
    sums: int,
) -> None:
    """Sum the gradient of every row of some blocks, from one source's bags.

    Args:
        places: address of each slot's gradients, and step from bag to bag, ``[S, 2]``.
        blocks: places of the blocks, ``[K, 7]``, see :func:`update`.
        wanted: indices of the blocks to sum.
        ids: row numbers, ``[N]``.
        id_weights: weight of each id, ``[N]``, or empty.
        lengths: number of ids of each bag; empty if each id is a bag of its own.
        bags: number of bags of each cell.
        first_id: first id of each cell, made by :func:`first_ids`.
        starts: start of each wanted block's rows in ``sums``, start of its marks, and number of its rows,
            ``[wanted, 3]``.
        sums: address of memory that receives ``C`` columns of each row, and its mark: 1 if it was looked up, else 0.
    """
    for index in range(wanted.shape[0]):
        block = wanted[index]
        own = blocks[block, 4]
        rows, marks, num_rows = starts[index]
        clear(sums, rows, num_rows * own)
        clear(sums, marks, num_rows)
        for slot in range(blocks[block, 0], blocks[block, 1]):
            gradients, stride = places[slot]
            bag = 0
            for before in range(slot):
                bag += bags[before]
            position = first_id[slot]
            for number in range(bags[slot]):
                count = lengths[bag + number] if lengths.shape[0] else 1
                if number + AHEAD < bags[slot]:
                    prefetch_row(gradients, (number + AHEAD) * stride, own)
                for at in range(position, position + count):
                    write(sums, marks + ids[at], np.float32(1))
                factors = id_weights.ctypes.data + 4 * position if id_weights.shape[0] else 0
                place = number * stride
                add_to_rows(
                    sums, rows, own, own, ids.ctypes.data + 8 * position, factors, count, gradients, place
                )
                position += count


@compiled_loop
def _add_terms(sums: Any, place: int, size: int, scale: Any, total: int) -> None:
    """Set ``total`` to ``scale`` times the sum of all terms' float32 at ``place``."""
    last = sums.shape[0] - 1
    first = sums[0]
    if last == 1:
        set_to_sum(first, sums[1], place, size, scale, total)
        return
    for column in range(size if last == 0 else 0):
        write(total, column, scale * read(first, place + column))
    for term in range(1, last + 1):
        other = sums[term]
        for column in range(size):
            value = (read(first, place + column) if term == 1 else read(total, column)) + read(
                other, place + column
            )
            write(total, column, value * scale if term == last else value)


@compiled_loop
def update_all(
    optimizer: int,
    numbers: Any,
    weights: int,
    first: int,
    second: int,
    blocks: Any,
    wanted: Any,
    sums: Any,
    starts: Any,
    scale: Any,
    room: Any,
) -> None:
    """Update every row of some blocks that was looked up.

    Args:
        optimizer: number of the optimizer, see :func:`update`.
        numbers: hyperparameters, see :func:`update`.
        weights: address of the flat weights, changed.
        first: address of the flat first state, changed.
        second: address of the flat second state, changed.
        blocks: places of the blocks, ``[K, 7]``, see :func:`update`.
        wanted: indices of the blocks to update.
        sums: addresses of the sums that :func:`add_up_rows` wrote on one or several ranks, added up in this order.
        starts: places of the wanted blocks in the sums, ``[wanted, 3]``, see :func:`add_up_rows`.
        scale: factor of the sum.
        room: memory for the sum of a row's gradients, as wide as the widest ``C``. Numba would free its own as soon as
            it has the address.
    """
    total = room.ctypes.data
    for index in range(wanted.shape[0]):
        block = wanted[index]
        base, dim, own = blocks[block, 2], blocks[block, 3], blocks[block, 4]
        offset, first_row = blocks[block, 5], blocks[block, 6]
        rows, marks, num_rows = starts[index]
        for number in range(num_rows):
            touched = False
            for term in range(sums.shape[0]):
                touched = touched or read(sums[term], marks + number) != 0
            if touched:
                _add_terms(sums, rows + number * own, own, scale, total)
                row = base + number * dim
                one = np.float32(1)  # the terms were multiplied when they were added up
                _update_row(
                    optimizer, numbers, weights, row, dim, total, one, own, offset, first, second,
                    first_row + number,
                )  # fmt: skip
