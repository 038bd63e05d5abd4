"""Rows of float32 values, read and written in registers by the loops of the ``fused_numba`` kernel.

Numba counts references to arrays that are passed on or cut into slices, and tests every index for being negative: at
every row that costs more than the row's arithmetic. What is read and written row by row is therefore given as the
address of its first float32, and reached by :func:`read`, :func:`write` and :func:`prefetch`.

Loops release the GIL and keep no state, so that threads may each take a range of slots or blocks, or, where one table
is most of the work, a part of each: of a slot some of its bags, of a block some of its rows.
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

LINE = 16  # float32 values of a cache line


# Rows between a prefetch and its use, into the second cache, which keeps more misses under way than the first: of 4, 8,
# 16 and 32, and of both caches, the best measured on an AMD EPYC (forward of 24 x 100k x 64: 10.6 ms, 24 ms before).
AHEAD = 32
_SECOND_CACHE = 2  # LLVM's name for it


_STEPS = ((4 * LINE, LINE), (LINE, LINE), (4, 4), (1, 1))  # columns at once, and of one register


# Sums may be made in any order and with fused multiply-adds, so that they use vector registers. Divisions by zero give
# infinities, as they do in torch; a test for each would forbid vector instructions.
OPTIONS = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}


compiled_loop: Any = partial(compiled, **OPTIONS)


def _pointer(builder: Any, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, ir.FloatType().as_pointer()), [index])


@intrinsic
def read(typing_context: Any, address: Any, index: Any) -> Any:
    """The float32 of that index."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, *arguments))

    return types.float32(types.int64, types.int64), generate


@intrinsic
def write(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Set the float32 of that index."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _pointer(builder, *arguments[:2]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def prefetch(typing_context: Any, address: Any, index: Any) -> Any:
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
def sum_rows(
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
def add_to_rows(
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


@compiled_loop
def prefetch_row(values: int, start: int, size: int) -> None:
    for column in range(0, size, LINE):
        prefetch(values, start + column)


@compiled_loop
def clear(values: int, start: int, size: int) -> None:
    for column in range(size):
        write(values, start + column, np.float32(0))


@intrinsic
def add_row(
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
def set_to_sum(
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


@compiled_loop
def subtract(values: int, index: int, value: Any) -> None:
    write(values, index, read(values, index) - value)
