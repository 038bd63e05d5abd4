"""The compiled loops of the ``fused_numba`` kernel.

Legend: W sources, S slots, K blocks, N ids, D columns of a block, C columns of a slot's gradient. *Cells* are (source,
slot) pairs in the order the bags arrived, cell ``source * S + slot``. Weights of all blocks stand in one flat array.
Loops release the GIL and keep no state, so that threads may each take a range of slots or blocks, or, where one table
is most of the work, a part of each: of a slot some of its bags, of a block some of its rows.

Equal ids are found by sorting (radix, least significant digit first: Knuth, The Art of Computer Programming 3, section
5.2.5), which is stable: a row's gradients are added in the order of its ids, however many threads there are, so that
the same batch gives the same bits. The sort needs ids alone, so that it can be done before there are gradients.

All of it stands in one file, long as it is: what Numba keeps on disk of a function is thrown away when the function's
own file changes, and not when another file does whose functions were compiled into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shardwright_plugins.compute_kernels._compiled import compiled

SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM = range(4)

LINE = 16  # float32 values of a cache line
# Rows between a prefetch and its use, into the second cache, which keeps more misses under way than the first: of 4, 8,
# 16 and 32, and of both caches, the best measured on an AMD EPYC (forward of 24 x 100k x 64: 10.6 ms, 24 ms before).
_AHEAD = 32
_SECOND_CACHE = 2  # LLVM's name for it
# float32 values that a core's own cache holds (half a MiB): fetching them ahead only takes time.
_NEAR = 1 << 17
_STEPS = ((4 * LINE, LINE), (LINE, LINE), (4, 4), (1, 1))  # columns at once, and of one register
_DIGIT_BITS = 11  # of a radix sort, at most: counts of all digits stay in the first cache
_ROW_SHIFT = 32  # of a sort key: the row above, the number of the id below

# Sums may be made in any order and with fused multiply-adds, so that they use vector registers. Divisions by zero give
# infinities, as they do in torch; a test for each would forbid vector instructions.
_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
_compiled: Any = partial(compiled, **_OPTIONS)


# Numba counts references to arrays that are passed on or cut into slices, and tests every index for being negative: at
# every row that costs more than the row's arithmetic. What is read and written row by row is therefore given as the
# address of its first float32, and reached by the next three.


def _pointer(builder: Any, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, ir.FloatType().as_pointer()), [index])


@intrinsic
def _get(typing_context: Any, address: Any, index: Any) -> Any:
    """The float32 of that index."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, *arguments))

    return types.float32(types.int64, types.int64), generate


@intrinsic
def _set(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Set the float32 of that index."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _pointer(builder, *arguments[:2]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def _prefetch(typing_context: Any, address: Any, index: Any) -> Any:
    """Ask for the cache line of the float32 of that index; an address that does not exist is ignored."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        line = builder.bitcast(_pointer(builder, *arguments), byte)
        builder.call(function, [line, number(0), number(_SECOND_CACHE), number(1)])  # to read, data
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _emit_sums(
    builder: Any, columns: Any, step: int, lanes: int, count: Any, row_at: Any, out_at: Any
) -> Any:
    """Sum ``count`` rows, ``step`` columns at a time, while so many are left; returns the first column left.

    Args:
        builder: builder of LLVM's instructions.
        columns: the first column, and the one after the last.
        step: columns summed at once, in registers.
        lanes: columns of one register.
        count: number of rows.
        row_at: function of a row's number and a column that returns a pointer to it, and the row's factor or ``None``.
        out_at: function of a column that returns a pointer to its sum.
    """
    kind = ir.VectorType(ir.FloatType(), lanes) if lanes > 1 else ir.FloatType()
    with _columns(builder, columns, step) as (column, limit):
        sums = [cgutils.alloca_once_value(builder, ir.Constant(kind, None)) for _ in range(step // lanes)]
        for total in sums:
            builder.store(ir.Constant(kind, None), total)
        with cgutils.for_range(builder, count) as row:
            pointer, factor = row_at(row.index, column)
            for number, total in enumerate(sums):
                value = builder.load(_vector(builder, pointer, kind, number), align=4)
                if factor is not None:
                    value = _times(builder, value, factor, kind)
                builder.store(builder.fadd(builder.load(total), value, flags=("contract",)), total)
        for number, total in enumerate(sums):
            builder.store(builder.load(total), _vector(builder, out_at(column), kind, number), align=4)
    return limit


def _emit_additions(
    builder: Any, columns: Any, step: int, lanes: int, count: Any, row_at: Any, value_at: Any
) -> Any:
    """Add values to ``count`` rows, ``step`` columns at a time; the rest is as for :func:`_emit_sums`."""
    kind = ir.VectorType(ir.FloatType(), lanes) if lanes > 1 else ir.FloatType()
    numbers = range(step // lanes)
    with _columns(builder, columns, step) as (column, limit):
        values = [builder.load(_vector(builder, value_at(column), kind, n), align=4) for n in numbers]
        with cgutils.for_range(builder, count) as row:
            pointer, factor = row_at(row.index, column)
            places = [_vector(builder, pointer, kind, number) for number in numbers]
            totals = [builder.load(place, align=4) for place in places]  # all, before any is stored
            for place, total, value in zip(places, totals, values, strict=True):
                added = value if factor is None else _times(builder, value, factor, kind)
                builder.store(builder.fadd(total, added, flags=("contract",)), place, align=4)
    return limit


@contextmanager
def _columns(builder: Any, columns: Any, step: int) -> Iterator[tuple[Any, Any]]:
    """A loop over columns, ``step`` at a time, while so many are left: the column, and the first one left."""
    first, stop = columns
    width = ir.IntType(64)(step)
    limit = builder.add(first, builder.mul(builder.sdiv(builder.sub(stop, first), width), width))
    with cgutils.for_range_slice(builder, first, limit, width) as (column, _):
        yield column, limit


def _vector(builder: Any, pointer: Any, kind: Any, number: int) -> Any:
    """A pointer to the register of that number, counted from ``pointer``."""
    lanes = 1 if isinstance(kind, ir.FloatType) else kind.count
    return builder.bitcast(builder.gep(pointer, [ir.IntType(64)(number * lanes)]), kind.as_pointer())


def _times(builder: Any, value: Any, factor: Any, kind: Any) -> Any:
    return builder.fmul(value, _spread(builder, factor, kind), flags=("contract",))


def _with_and_without(builder: Any, factors: Any, emit: Any) -> None:
    """Emit code twice, with factors and without, and a branch that chooses between them at run time."""
    has_factors = builder.icmp_signed("!=", factors, ir.IntType(64)(0))
    with builder.if_else(has_factors) as (then, otherwise):
        with then:
            emit(True)
        with otherwise:
            emit(False)


def _spread(builder: Any, factor: Any, kind: Any) -> Any:
    """A factor in every lane."""
    if isinstance(kind, ir.FloatType):
        return factor
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, factor, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None)
    return builder.shuffle_vector(first, undefined, lanes)


@intrinsic
def _sum_rows(
    typing_context: Any,
    rows: Any,
    base: Any,
    stride: Any,
    dim: Any,
    ids: Any,
    factors: Any,
    count: Any,
    vector: Any,
    place: Any,
) -> Any:
    """Set a vector to the sum of some rows; sums stay in registers. Arguments: see :func:`_rows_and_vector`."""
    return _rows_and_vector(_emit_sums)


@intrinsic
def _add_to_rows(
    typing_context: Any,
    rows: Any,
    base: Any,
    stride: Any,
    dim: Any,
    ids: Any,
    factors: Any,
    count: Any,
    vector: Any,
    place: Any,
) -> Any:
    """Add a vector to some rows; it is read once, into registers. Arguments: see :func:`_rows_and_vector`."""
    return _rows_and_vector(_emit_additions)


def _rows_and_vector(emit_step: Any) -> Any:
    """The signature and the code of what goes over some rows with one vector.

    Args of the compiled function: the rows' address and where row 0 begins there, float32 values from row to row,
    columns of a row, the address of int64 row numbers, that of the rows' float32 factors or 0, how many, and the
    address and place of the vector.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, base, stride, dim, ids, factors, count, vector, place = arguments
        integer = ir.IntType(64)
        numbers = builder.inttoptr(ids, integer.as_pointer())

        def emit(is_weighted: bool) -> None:
            def row_at(number: Any, column: Any) -> Any:
                row = builder.load(builder.gep(numbers, [number]))
                index = builder.add(builder.add(base, column), builder.mul(row, stride))
                factor = builder.load(_pointer(builder, factors, number)) if is_weighted else None
                return _pointer(builder, rows, index), factor

            def vector_at(column: Any) -> Any:
                return _pointer(builder, vector, builder.add(place, column))

            first = integer(0)
            for step, lanes in _STEPS:
                first = emit_step(builder, (first, dim), step, lanes, count, row_at, vector_at)

        _with_and_without(builder, factors, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@_compiled
def _prefetch_row(values: int, start: int, size: int) -> None:
    for column in range(0, size, LINE):
        _prefetch(values, start + column)


@_compiled
def _clear(values: int, start: int, size: int) -> None:
    for column in range(size):
        _set(values, start + column, np.float32(0))


@intrinsic
def _add_row(
    typing_context: Any, values: Any, start: Any, size: Any, factor: Any, sums: Any, place: Any
) -> Any:
    """Add ``factor`` times the ``size`` float32 at ``start`` of ``values`` to those at ``place`` of ``sums``.

    Registers of 16, 4 and 1 columns, without the test for an overlap that a plain loop would make for every row.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, start, size, factor, sums, place = arguments
        integer = ir.IntType(64)
        first: Any = integer(0)
        for step, lanes in _STEPS:
            kind = ir.VectorType(ir.FloatType(), lanes) if lanes > 1 else ir.FloatType()
            factors = _spread(builder, factor, kind)
            limit = builder.mul(builder.sdiv(size, integer(step)), integer(step))
            with cgutils.for_range_slice(builder, first, limit, integer(step)) as (column, _):
                for number in range(0, step, lanes):
                    index = builder.add(column, integer(number))
                    source = _pointer(builder, values, builder.add(start, index))
                    target = builder.bitcast(
                        _pointer(builder, sums, builder.add(place, index)), kind.as_pointer()
                    )
                    value = builder.load(builder.bitcast(source, kind.as_pointer()), align=4)
                    product = builder.fmul(value, factors, flags=("contract",))
                    total = builder.fadd(builder.load(target, align=4), product, flags=("contract",))
                    builder.store(total, target, align=4)
            first = limit
        return context.get_dummy_value()

    kinds = (types.int64, types.int64, types.int64, types.float32, types.int64, types.int64)
    return types.void(*kinds), generate


@intrinsic
def _set_to_sum(
    typing_context: Any, first: Any, second: Any, start: Any, size: Any, scale: Any, out: Any
) -> Any:
    """Set ``out`` to ``scale`` times the sum of the ``size`` float32 at ``start`` of two arrays."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, second, start, size, scale, out = arguments
        column: Any = ir.IntType(64)(0)
        for step, lanes in _STEPS:
            kind = ir.VectorType(ir.FloatType(), lanes) if lanes > 1 else ir.FloatType()
            with _columns(builder, (column, size), step) as (place, limit):
                sources = [_pointer(builder, term, builder.add(start, place)) for term in (first, second)]
                target = _pointer(builder, out, place)
                for number in range(step // lanes):
                    terms = [builder.load(_vector(builder, own, kind, number), align=4) for own in sources]
                    total = _times(builder, builder.fadd(*terms), scale, kind)
                    builder.store(total, _vector(builder, target, kind, number), align=4)
            column = limit
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32, types.int64), generate


@_compiled
def _subtract(values: int, index: int, value: Any) -> None:
    _set(values, index, _get(values, index) - value)


@_compiled
def first_ids(lengths: Any, bags: Any) -> Any:
    """Compute the first id of each cell, and the number of all ids: ``[W * S + 1]``.

    Args:
        lengths: number of ids of each bag; empty if each id is a bag of its own.
        bags: number of bags of each cell, ``[W * S]``.
    """
    first = np.zeros(bags.shape[0] + 1, np.int64)
    bag = 0
    for cell in range(bags.shape[0]):
        count = bags[cell]
        if lengths.shape[0]:
            count = 0
            for _ in range(bags[cell]):
                count += lengths[bag]
                bag += 1
        first[cell + 1] = first[cell] + count
    return first


@_compiled
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
            places[cell, 0], places[cell, 1], places[cell, 2] = bag, start, dims[slot]
            bag += counts[source, slot]
            start += counts[source, slot] * dims[slot]
    return places, start


@_compiled
def _ids_before(lengths: Any, bag: int, count: int) -> int:
    """The ids of the first bags of a cell."""
    if not lengths.shape[0]:
        return count
    num_ids = 0
    for number in range(count):
        num_ids += lengths[bag + number]
    return num_ids


@_compiled
def look_up(
    weights: int,
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
        weights: address of the flat weights.
        slots: start of each slot's block in ``weights``, ``D``, and the block's number of rows, ``[S, 3]``.
        share: first slot, slot after the last, number of the part of each slot's bags, and number of parts.
        ids: row numbers, ``[N]``.
        id_weights: weight of each id, ``[N]``, or empty.
        lengths: number of ids of each bag; empty if each id is a bag of its own.
        bags: number of bags of each cell, ``[W * S]``.
        first_id: first id of each cell, made by :func:`first_ids`.
        places: first bag of each cell, start of its result in ``out``, and step from bag to bag in ``out``,
            ``[W * S, 3]``.
        out: address of the flat results; every element of these slots is written.

    Raises:
        IndexError: an id is no row of its block.
    """
    num_slots = slots.shape[0]
    for source in range(bags.shape[0] // num_slots):
        for slot in range(share[0], share[1]):
            cell = source * num_slots + slot
            base, dim, num_rows = slots[slot]
            bag, start, stride = places[cell]
            first_bag = bags[cell] * share[2] // share[3]
            at, stop = first_id[cell] + _ids_before(lengths, bag, first_bag), first_id[cell + 1]
            if num_rows * dim > _NEAR:
                for position in range(at, min(at + _AHEAD, stop)):
                    _prefetch_row(weights, base + ids[position] * dim, dim)
            for number in range(first_bag, bags[cell] * (share[2] + 1) // share[3]):
                place = start + number * stride
                count = lengths[bag + number] if lengths.shape[0] else 1
                if number + _AHEAD < bags[cell]:
                    _prefetch_row(out, place + _AHEAD * stride, dim)
                for position in range(at, at + count):
                    if num_rows * dim > _NEAR and position + _AHEAD < stop:
                        _prefetch_row(weights, base + ids[position + _AHEAD] * dim, dim)
                    if not 0 <= ids[position] < num_rows:
                        raise IndexError("an id is no row of its table")
                factors = id_weights.ctypes.data + 4 * at if id_weights.shape[0] else 0
                _sum_rows(weights, base, dim, dim, ids.ctypes.data + 8 * at, factors, count, out, place)
                at += count


@_compiled
def _hash(row: int) -> Any:
    """32 bits, by Fibonacci hashing: 2^64 divided by the golden ratio."""
    return (np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)


@_compiled
def _part_of(row: int, num_parts: int) -> Any:
    """The part that a row is in, by the upper bits of its hash."""
    return np.int64((_hash(row) * np.uint64(num_parts)) >> np.uint64(32))


@_compiled
def _list_ids(
    block_slots: Any,
    num_slots: int,
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
    for source in range(bags.shape[0] // num_slots):
        for slot in range(block_slots[0], block_slots[1]):
            cell = source * num_slots + slot
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


@_compiled
def _num_bits(number: int) -> int:
    """Bits that a number has."""
    bits = 0
    while number >> bits:
        bits += 1
    return bits


@_compiled
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


@_compiled
def most_ids(blocks: Any, share: Any, num_slots: int, bags: Any, first_id: Any) -> Any:
    """The most ids that a block of a share has, and the ids of all of them; see :func:`sort_ids`."""
    most, total = 0, 0
    for block in range(share[0], share[1]):
        count = 0
        for source in range(bags.shape[0] // num_slots):
            cell = source * num_slots
            count += first_id[cell + blocks[block, 1]] - first_id[cell + blocks[block, 0]]
        most, total = max(most, count), total + count
    return most, total


@_compiled
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
    most: int,
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
        most: most ids of a block, made by :func:`most_ids`.
        ends: receives, for each block of the share, the number of ids up to its end.
        rows: receives the row of each id, block after block, rising; int32.
        starts: receives the start of each id's gradient.
        factors: receives the weight of each id, if ``id_weights`` has any.
    """
    keys, room = np.empty(most, np.int64), np.empty(most, np.int64)
    position_of, gradient_of = np.empty(most, np.int64), np.empty(most, np.int64)
    counts = np.empty(1 << _DIGIT_BITS, np.int64)
    first = 0
    for block in range(share[0], share[1]):
        count, highest = _list_ids(
            blocks[block], num_slots, share[2], share[3], ids, lengths, bags, first_id, places, keys, position_of,
            gradient_of,
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


@_compiled
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
        _add_row(total, offset, dim, -rate * scale, weights, row)
    elif optimizer == ADAGRAD:
        for column in range(dim):
            value = scale * _get(total, offset + column)
            squares = _get(first, state + column) + value * value
            _set(first, state + column, squares)
            _subtract(weights, row + column, rate * value / (np.sqrt(squares) + eps))
    elif optimizer == ROW_WISE_ADAGRAD:
        squares = np.float32(0)
        for column in range(own):
            squares += _get(total, column) * _get(total, column)
        squares = _get(first, state) + scale * scale * squares / np.float32(own)
        _set(first, state, squares)
        step = scale * rate / (np.sqrt(squares) + eps)
        _add_row(total, offset, dim, -step, weights, row)
    else:
        rate /= numbers[5]
        for column in range(dim):
            value = scale * _get(total, offset + column)
            average = _get(first, state + column)
            average += numbers[2] * (value - average)
            squares = numbers[3] * _get(second, state + column) + numbers[4] * value * value
            _set(first, state + column, average)
            _set(second, state + column, squares)
            _subtract(weights, row + column, rate * average / (np.sqrt(squares / numbers[6]) + eps))


@_compiled
def _prefetch_state(optimizer: int, first: int, row: int, dim: int, number: int) -> None:
    """Fetch the first state of a row into a cache; the arguments are those of :func:`_update_row`."""
    if optimizer == ROW_WISE_ADAGRAD:
        _prefetch(first, number)
    elif optimizer != SGD:
        _prefetch_row(first, row, dim)


@_compiled
def update(
    optimizer: int,
    numbers: Any,
    weights: int,
    first: int,
    second: int,
    blocks: Any,
    share: Any,
    ends: Any,
    rows: Any,
    starts: Any,
    factors: Any,
    gradients: int,
    scale: Any,
    total: int,
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
        share: first block, block after the last, number of the part of each block's rows, and number of parts.
        ends: number of ids up to the end of each block of the share, written by :func:`sort_ids`.
        rows: row of each id, rising in each block, written by :func:`sort_ids`.
        starts: start of each id's gradient in ``gradients``, written by :func:`sort_ids`.
        factors: weight of each id, written by :func:`sort_ids`; empty if all are 1.
        gradients: address of the flat gradients.
        scale: factor of the gradients.
        total: address of memory for the widest ``C``.
    """
    index = 0
    for block in range(share[0], share[1]):
        base, dim, own = blocks[block, 2], blocks[block, 3], blocks[block, 4]
        offset, first_row = blocks[block, 5], blocks[block, 6]
        stop, ahead = ends[block - share[0]], index
        while index < stop:
            number = rows[index]
            last = index + 1
            while last < stop and rows[last] == number:
                last += 1
            while ahead < min(last + _AHEAD, stop):
                soon = rows[ahead]
                _prefetch_row(gradients, starts[ahead], own)
                _prefetch_row(weights, base + soon * dim, dim)
                _prefetch_state(optimizer, first, base + soon * dim, dim, first_row + soon)
                ahead += 1
            weighted = factors.ctypes.data + 4 * index if factors.shape[0] else 0
            _sum_rows(gradients, 0, 1, own, starts.ctypes.data + 8 * index, weighted, last - index, total, 0)
            row = base + number * dim
            _update_row(
                optimizer, numbers, weights, row, dim, total, scale, own, offset, first, second,
                first_row + number,
            )  # fmt: skip
            index = last


@_compiled
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
        _clear(sums, rows, num_rows * own)
        _clear(sums, marks, num_rows)
        for slot in range(blocks[block, 0], blocks[block, 1]):
            gradients, stride = places[slot]
            bag = 0
            for before in range(slot):
                bag += bags[before]
            position = first_id[slot]
            for number in range(bags[slot]):
                count = lengths[bag + number] if lengths.shape[0] else 1
                if number + _AHEAD < bags[slot]:
                    _prefetch_row(gradients, (number + _AHEAD) * stride, own)
                for at in range(position, position + count):
                    _set(sums, marks + ids[at], np.float32(1))
                factors = id_weights.ctypes.data + 4 * position if id_weights.shape[0] else 0
                place = number * stride
                _add_to_rows(
                    sums, rows, own, own, ids.ctypes.data + 8 * position, factors, count, gradients, place
                )
                position += count


@_compiled
def _add_terms(sums: Any, place: int, size: int, scale: Any, total: int) -> None:
    """Set ``total`` to ``scale`` times the sum of all terms' float32 at ``place``."""
    last = sums.shape[0] - 1
    first = sums[0]
    if last == 1:
        _set_to_sum(first, sums[1], place, size, scale, total)
        return
    for column in range(size if last == 0 else 0):
        _set(total, column, scale * _get(first, place + column))
    for term in range(1, last + 1):
        other = sums[term]
        for column in range(size):
            value = (_get(first, place + column) if term == 1 else _get(total, column)) + _get(
                other, place + column
            )
            _set(total, column, value * scale if term == last else value)


@_compiled
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
    total: int,
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
        total: address of memory for the widest ``C``.
    """
    for index in range(wanted.shape[0]):
        block = wanted[index]
        base, dim, own = blocks[block, 2], blocks[block, 3], blocks[block, 4]
        offset, first_row = blocks[block, 5], blocks[block, 6]
        rows, marks, num_rows = starts[index]
        for number in range(num_rows):
            touched = False
            for term in range(sums.shape[0]):
                touched = touched or _get(sums[term], marks + number) != 0
            if touched:
                _add_terms(sums, rows + number * own, own, scale, total)
                row = base + number * dim
                one = np.float32(1)  # the terms were multiplied when they were added up
                _update_row(
                    optimizer, numbers, weights, row, dim, total, one, own, offset, first, second,
                    first_row + number,
                )  # fmt: skip
