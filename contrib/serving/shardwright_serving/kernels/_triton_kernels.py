"""The Triton kernel of ``quant_triton``.

Legend: S slots, D columns of a block. Tiles are ``[ITEMS, COLUMNS]``: bags, and columns of the widest block, a power of
2. Rows stand as `shardwright_serving.rows.quantized_rows` says, each in whole words of 4 bytes. The table of slots has
int64 rows ``[start of the rows in words, D, words of a row, elements of a row]``; the table of cells is that of
``fused_triton``. *Elements* are what a row's columns are held in: bytes, or float16 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright_plugins.kernel_parts.by_triton import FROM_PAYLOAD, places_of, spans_of

_SLOT = tl.constexpr(4)


@triton.jit
def _half(bits):  # type: ignore[no-untyped-def]
    """Float32 values of float16 numbers, given as the lowest 16 bits of int32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _numbers(stored, BITS: tl.constexpr, IS_FLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Float32 values of bytes before scale and bias; the first column is in a byte's lowest bits."""
    if BITS == 8 and IS_FLOAT:
        # Float8 e4m3 moved to where float16 has its bits; the bias of the exponent differs by 8. Exact, subnormals too.
        bits = stored.to(tl.int32)
        values = _half(((bits & 0x80) << 8) | ((bits & 0x7F) << 7)) * 256.0
    else:
        if BITS == 2:
            stored = tl.interleave(stored & 0xF, stored >> 4)
            stored = tl.interleave(stored & 3, stored >> 2)
        if BITS == 4:
            stored = tl.interleave(stored & 0xF, stored >> 4)
        values = stored.to(tl.float32)
    return values


@triton.jit(do_not_specialize=["num_bags", "num_slots"], do_not_specialize_on_alignment=FROM_PAYLOAD)
def look_up_rows(  # type: ignore[no-untyped-def]
    words, elements, slots, num_slots, cells, cell_of_bag, ids, id_weights, ends, lengths, out, num_bags,
    IS_SEQUENCE: tl.constexpr, IS_WEIGHTED: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr,
    ALIGNED: tl.constexpr, ALIGNED_ELEMENTS: tl.constexpr, ALIGNED_OUT: tl.constexpr, ITEMS: tl.constexpr,
    UNROLL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the (weighted) rows of each bag in float32, in the order of the ids."""
    bags = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    are_bags = bags < num_bags
    cell, place = places_of(bags, are_bags, cells, cell_of_bag)
    slot = slots + (cell % num_slots) * _SLOT
    base = tl.load(slot, mask=are_bags, other=0)
    dim = tl.load(slot + 1, mask=are_bags, other=0)
    size = tl.load(slot + 2, mask=are_bags, other=0)
    # What the compiler is told of divisibility lets it read rows, and write results, in vectors.
    dim = tl.multiple_of(dim, ALIGNED_OUT)
    num_held = tl.multiple_of(tl.load(slot + 3, mask=are_bags, other=0), ALIGNED_ELEMENTS)
    firsts, counts = spans_of(bags, are_bags, ends, lengths, IS_SEQUENCE)
    PER_ELEMENT: tl.constexpr = 8 // BITS if BITS < 8 else 1
    held = tl.arange(0, COLUMNS // PER_ELEMENT)
    is_held = held[None, :] < num_held[:, None]
    total = tl.zeros([ITEMS, COLUMNS], tl.float32)
    longest = tl.max(counts)
    done = longest * 0
    while done < longest:
        # Reads of several ids do not wait for each other; their sum is still in the order of the ids.
        for step in tl.static_range(UNROLL):
            is_id = done + step < counts
            at = firsts + done + step
            row = tl.load(ids + at, mask=is_id, other=0)
            start = tl.multiple_of(base + row * size, ALIGNED)
            is_value = is_id[:, None] & is_held
            if BITS == 16:
                values = tl.load(elements + start[:, None] * 2 + held[None, :], mask=is_value, other=0.0)
                values = values.to(tl.float32)
            else:
                header = tl.load(words + start, mask=is_id, other=0)
                stored = tl.load(elements + start[:, None] * 4 + 4 + held[None, :], mask=is_value, other=0)
                scaled = _numbers(stored, BITS, IS_FLOAT) * _half(header)[:, None]
                values = scaled + _half(header >> 16)[:, None]
            if IS_WEIGHTED:
                weight = tl.load(id_weights + at, mask=is_id, other=0.0)
                # The product is not rounded, as it is not by the other kernels on processors that fuse it with the sum.
                total = tl.fma(values, tl.broadcast_to(weight[:, None], [ITEMS, COLUMNS]), total)
            else:
                total += values
        done += UNROLL
    columns = tl.arange(0, COLUMNS)
    place = tl.multiple_of(place, ALIGNED_OUT)
    is_result = are_bags[:, None] & (columns[None, :] < dim[:, None])
    tl.store(out + place[:, None] + columns[None, :], total, mask=is_result)
