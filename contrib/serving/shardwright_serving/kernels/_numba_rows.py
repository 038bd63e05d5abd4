"""Quantized rows in registers: the code that sums the rows of a bag, as LLVM has it.

A row's values are made in registers and added to its bag's sums, which stay in registers: ``(value * scale + bias)``,
times the id's weight. The product has no more bits than a float32, so that only two sums are rounded.

Legend: D columns of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

INT8, INT4, INT2, FP8, FP16 = range(5)


KINDS: Mapping[str, int] = {"INT8": INT8, "INT4": INT4, "INT2": INT2, "FP8": FP8, "FP16": FP16}


_BITS = {INT8: 8, INT4: 4, INT2: 2, FP8: 8, FP16: 16}


_HEADER = 4  # bytes of scale and bias


_STEPS = (64, 16, 4, 1)  # columns at once


_LANES = 16  # float32 values of one register


_CAN_CONVERT = llvm.get_host_cpu_features().get("f16c", False) or "aarch64" in llvm.get_default_triple()
"""This processor converts float16 by itself; elsewhere LLVM would call a function that Numba has not."""


_FLOAT, INT, LONG, BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)


def _lanes(kind: Any, lanes: int) -> Any:
    return ir.VectorType(kind, lanes) if lanes > 1 else kind


def _spread(builder: Any, value: Any, lanes: int) -> Any:
    """A value in every lane."""
    if lanes == 1:
        return value
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT, lanes), [0] * lanes))


def _constant(value: Any, kind: Any, lanes: int) -> Any:
    return ir.Constant(_lanes(kind, lanes), [value] * lanes if lanes > 1 else value)


def _bytes_at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """The value of a type at an address of any alignment."""
    pointer = builder.inttoptr(builder.add(address, offset), kind.as_pointer())
    return builder.load(pointer, align=1)


def _small_floats(builder: Any, bits: Any, lanes: int, mantissa: int, exponent: int) -> Any:
    """Float32 values of small floats, given as 32-bit integers.

    The bits but the sign are moved to where float32 has them; the bias of the exponent is made up for by a product,
    which is exact, and right for subnormal numbers too.

    Args:
        builder: builder of LLVM's instructions.
        bits: the small floats.
        lanes: number of floats.
        mantissa: bits of their mantissa.
        exponent: bits of their exponent.
    """
    size = mantissa + exponent
    magnitude = builder.and_(bits, _constant((1 << size) - 1, INT, lanes))
    moved = builder.shl(magnitude, _constant(23 - mantissa, INT, lanes))
    factor = 2.0 ** (127 - ((1 << exponent - 1) - 1))
    value = builder.fmul(builder.bitcast(moved, _lanes(_FLOAT, lanes)), _constant(factor, _FLOAT, lanes))
    sign = builder.shl(builder.and_(bits, _constant(1 << size, INT, lanes)), _constant(31 - size, INT, lanes))
    whole = builder.or_(builder.bitcast(value, _lanes(INT, lanes)), sign)
    return builder.bitcast(whole, _lanes(_FLOAT, lanes))


def _halves(builder: Any, address: Any, offset: Any, lanes: int) -> Any:
    """Float16 numbers as float32."""
    if _CAN_CONVERT:
        return builder.fpext(
            _bytes_at(builder, address, offset, _lanes(ir.HalfType(), lanes)), _lanes(_FLOAT, lanes)
        )
    bits = _bytes_at(builder, address, offset, _lanes(ir.IntType(16), lanes))
    return _small_floats(builder, builder.zext(bits, _lanes(INT, lanes)), lanes, mantissa=10, exponent=5)


def _parts(builder: Any, kind: int, row: Any, column: Any, lanes: int, single: bool) -> list[Any]:
    """Values of a row's columns before scale and bias, as float32: one register for each place in a byte.

    Columns that share a byte are kept apart until the bag is summed: to take every second one costs less than to put
    them in order for each row.

    Args:
        builder: builder of LLVM's instructions.
        kind: precision of the rows.
        row: address of the row.
        column: first column, the first of a byte unless ``single``.
        lanes: bytes that are read, or elements of more bytes.
        single: read one column alone.
    """
    if kind == FP16:
        return [_halves(builder, row, builder.mul(column, LONG(2)), lanes)]
    bits = _BITS[kind]
    per_byte = 8 // bits
    place = builder.add(builder.udiv(column, LONG(per_byte)), LONG(_HEADER))
    read = _bytes_at(builder, row, place, _lanes(BYTE, lanes))
    if kind == FP8:
        return [_moved_fp8(builder, read, lanes)]
    wide, mask = builder.zext(read, _lanes(INT, lanes)), _constant((1 << bits) - 1, INT, lanes)
    if single:
        shifts = [builder.mul(builder.urem(builder.trunc(column, INT), INT(per_byte)), INT(bits))]
    else:
        shifts = [_constant(number * bits, INT, lanes) for number in range(per_byte)]
    numbers = [wide] if per_byte == 1 else [builder.and_(builder.lshr(wide, shift), mask) for shift in shifts]
    return [builder.sitofp(number, _lanes(_FLOAT, lanes)) for number in numbers]


def _moved_fp8(builder: Any, read: Any, lanes: int) -> Any:
    """Float8 e4m3 as float32 with the same bits: 2^-120 times the value, which the row's scale makes up for.

    The four bits of exponent and three of mantissa end where those of a float32 do; the sign is copied upwards with
    the byte's.
    """
    wide = builder.sext(read, _lanes(INT, lanes))
    moved = builder.shl(wide, _constant(20, INT, lanes))
    bits = builder.and_(moved, _constant(0x87F00000, INT, lanes))
    return builder.bitcast(bits, _lanes(_FLOAT, lanes))


def _scale_and_bias(builder: Any, kind: int, row: Any) -> list[Any]:
    """Scale and bias of a row, float32; none of FP16, and no bias of FP8, which is 0."""
    if kind == FP16:
        return []
    both = _halves(builder, row, LONG(0), 2)
    scale, bias = (builder.extract_element(both, INT(place)) for place in (0, 1))
    return [builder.fmul(scale, _FLOAT(2.0**120))] if kind == FP8 else [scale, bias]


def _in_order(builder: Any, parts: list[Any], lanes: int) -> Any:
    """Registers of the first, the second, ... column of each byte as one of all columns."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    first, second = (
        _in_order(builder, parts[start::2], lanes) for start in range(2)
    )  # of every second part, which are interleaved once more
    width = lanes * half
    order = [place for lane in range(width) for place in (lane, lane + width)]
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT, 2 * width), order))


def _emit_sums(
    builder: Any, kind: int, columns: tuple[Any, Any], step: int, count: Any, row_at: Any, out: Any
) -> Any:
    """Sum rows, ``step`` columns at a time, while so many are left; returns the first column left.

    Args:
        builder: builder of LLVM's instructions.
        kind: precision of the rows.
        columns: the first column, and the one after the last.
        step: columns summed at once, in registers.
        count: number of rows.
        row_at: function of a row's number that returns its address and its weight.
        out: pointer to the sums of all columns.
    """
    first, stop = columns
    width = LONG(step)
    limit = builder.add(first, builder.mul(builder.udiv(builder.sub(stop, first), width), width))
    per_byte = max(1, 8 // _BITS[kind]) if step > 1 else 1
    lanes = min(_LANES, step // per_byte)
    vector = _lanes(_FLOAT, lanes)
    groups = range(0, step, lanes * per_byte)  # of columns that are read together
    with cgutils.for_range_slice(builder, first, limit, width) as (column, _):
        sums = [[_zero(builder, vector) for _ in range(per_byte)] for _ in groups]
        with cgutils.for_range(builder, count) as loop:
            row, weight = row_at(loop.index)
            header = [_spread(builder, one, lanes) for one in _scale_and_bias(builder, kind, row)]
            weights = _spread(builder, weight, lanes)
            for start, totals in zip(groups, sums, strict=True):
                place = builder.add(column, LONG(start))
                parts = _parts(builder, kind, row, place, lanes, single=step == 1)
                for value, total in zip(parts, totals, strict=True):
                    _add(builder, _scaled(builder, value, header), weights, total)
        for start, totals in zip(groups, sums, strict=True):
            place = builder.gep(out, [builder.add(column, LONG(start))])
            _store(builder, [builder.load(total) for total in totals], lanes, place)
    return limit


def _zero(builder: Any, vector: Any) -> Any:
    """A register of zeros that is added to."""
    total = cgutils.alloca_once_value(builder, ir.Constant(vector, None))
    builder.store(ir.Constant(vector, None), total)  # each time that it is come by
    return total


def _scaled(builder: Any, value: Any, header: list[Any]) -> Any:
    if header:
        value = builder.fmul(value, header[0], flags=("contract",))
    return builder.fadd(value, header[1], flags=("contract",)) if len(header) > 1 else value


def _add(builder: Any, value: Any, weights: Any, total: Any) -> None:
    product = builder.fmul(value, weights, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


def _store(builder: Any, parts: list[Any], lanes: int, place: Any) -> None:
    if lanes == 1:
        for number, value in enumerate(parts):
            builder.store(value, builder.gep(place, [LONG(number)]), align=4)
        return
    whole = _in_order(builder, parts, lanes)
    builder.store(whole, builder.bitcast(place, whole.type.as_pointer()), align=4)


def _emit_bag(kind: int) -> Any:
    """The signature and the code of what sums the rows of one bag.

    Args of the compiled function: the address of row 0, bytes from row to row, columns, the address of int64 row
    numbers, that of the rows' float32 weights or 0, how many rows, and the address of the float32 sums.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, size, dim, ids, weights, count, out = arguments
        numbers = builder.inttoptr(ids, LONG.as_pointer())
        own, has_weights = (
            builder.inttoptr(weights, _FLOAT.as_pointer()),
            builder.icmp_signed("!=", weights, LONG(0)),
        )
        sums = builder.inttoptr(out, _FLOAT.as_pointer())

        def row_at(number: Any) -> tuple[Any, Any]:
            row = builder.add(rows, builder.mul(builder.load(builder.gep(numbers, [number])), size))
            weight = cgutils.alloca_once_value(builder, _FLOAT(1.0))
            builder.store(_FLOAT(1.0), weight)  # a product with it changes no bit
            with builder.if_then(has_weights):
                builder.store(builder.load(builder.gep(own, [number])), weight)
            return row, builder.load(weight)

        first: Any = LONG(0)
        for step in _STEPS:
            first = _emit_sums(builder, kind, (first, dim), step, count, row_at, sums)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _sum_of(kind: int) -> Any:
    """The function that sums rows of one precision. Arguments: see :func:`_emit_bag`."""

    @intrinsic
    def sum_rows(
        context: Any, rows: Any, size: Any, dim: Any, ids: Any, weights: Any, count: Any, out: Any
    ) -> Any:
        return _emit_bag(kind)

    return sum_rows


sum_int8, sum_int4, sum_int2, sum_fp8, sum_fp16 = map(_sum_of, (INT8, INT4, INT2, FP8, FP16))
