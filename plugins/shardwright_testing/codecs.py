"""Conformance tests of codecs, on one block of values: for authors of codecs, and for our own.

Legend: n rows, D columns.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.contracts.codec import Codec
from shardwright_testing.equality.random_cases import LAWS

_GUARD = 0xAB
_SIDE = 3

_SHAPES = ((0, 4), (1, 1), (5, 1), (1, 333), (64, 16))


class CodecTests:
    """The tests of a codec: give the fixture ``codec``, an instance."""

    def test_values_come_back_within_the_error_bound(self, codec: Codec) -> None:
        """Values come back, of any magnitude and offset as embeddings have them; nothing else is touched."""

        @settings(LAWS, max_examples=150)
        @given(value_blocks())
        def check(values: Tensor) -> None:
            check_codec(codec, values)

        check()

    def test_blocks_of_any_shape_come_back(self, codec: Codec) -> None:
        """No rows, one column, many of both."""
        for shape in _SHAPES:
            check_codec(codec, torch.randn(shape, generator=torch.Generator().manual_seed(1)))

    def test_bytes_are_counted_right(self, codec: Codec) -> None:
        """Whole numbers that do not fall with more columns; those of float32 where the codec is the identity."""
        sizes = [codec.row_bytes(columns) for columns in range(1, 300)]
        assert all(isinstance(size, int) for size in sizes), (
            f"{codec.name}: row_bytes() must be a whole number"
        )
        for columns, (size, more) in enumerate(pairwise(sizes), start=1):
            assert 0 < size <= more, (
                f"{codec.name}: row_bytes({columns}) is {size}, row_bytes({columns + 1}) is {more}"
            )
        if codec.is_identity:
            assert codec.row_bytes(5) == 20, (
                f"{codec.name}: is the identity, but 5 columns take {codec.row_bytes(5)}"
            )

    def test_bytes_are_the_same_each_time(self, codec: Codec) -> None:
        """Every rank reads what another writes: a codec has no state, and draws no lots."""
        values = torch.randn(9, 7, generator=torch.Generator().manual_seed(2))
        first, again = (_encoded(codec, values) for _ in range(2))
        assert torch.equal(first, again), (
            f"{codec.name}: encodes the same values to other bytes the second time"
        )
        fresh = _encoded(type(codec)(), values)
        assert torch.equal(first, fresh), (
            f"{codec.name}: a fresh codec encodes the same values to other bytes"
        )


@st.composite
def value_blocks(draw: st.DrawFn) -> Tensor:
    """Blocks of values of one magnitude, with offsets and exact zeros: ``[n, D]``."""
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(1, 9))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    noise = random.uniform(-1, 1, (rows, columns)) * random.choice([0.0, 1.0], (rows, columns), p=[0.1, 0.9])
    offset = draw(st.sampled_from([0.0, 1.0, -300.0]))
    magnitude = draw(st.sampled_from([1e-42, 1e-30, 1e-9, 1e-6, 1e-3, 1.0, 7e4, 1e30]))
    return torch.from_numpy(((noise + offset) * magnitude).astype(np.float32))


def _encoded(codec: Codec, values: Tensor) -> Tensor:
    encoded = torch.full((values.shape[0], codec.row_bytes(values.shape[1])), _GUARD, dtype=torch.uint8)
    codec.encode(values, encoded)
    return encoded


def check_codec(codec: Codec, values: Tensor) -> Tensor:
    """Encode and decode a block, and hold the codec to its contract.

    Args:
        codec: codec to test.
        values: ``[n, D]`` float32; NaN and infinities are left out of the error bound.

    Returns:
        What came back, ``[n, D]``.

    Raises:
        AssertionError: the codec wrote outside its rows, changed its input, made rows depend on their neighbours or on
            how they lie in memory, or is further from the values than its ``error_bound`` says.
    """
    decoded = _round_trip(codec, values)
    finite = values.isfinite()
    error = (decoded.double() - values.double()).abs()[finite]
    bound = codec.error_bound(values)
    assert bound.shape == values.shape, f"{codec.name}: error_bound gives {list(bound.shape)}"
    wrong = (error > bound.double()[finite]).nonzero()
    if wrong.numel():
        place = int(wrong[0, 0])
        value, came = float(values[finite][place]), float(decoded[finite][place])
        raise AssertionError(
            f"{codec.name}: {value!r} came back as {came!r}; the bound is {float(bound[finite][place])!r}"
        )
    if values.numel():
        (_check_shape if codec.is_elementwise else _check_rows)(codec, values, decoded)
    return decoded


def _check_shape(codec: Codec, values: Tensor, decoded: Tensor) -> None:
    """The block in another shape gives the same, since each value is written by itself."""
    sizes = codec.row_bytes(values.numel()), values.numel() * codec.row_bytes(1)
    assert sizes[0] == sizes[1], (
        f"{codec.name}: is elementwise, but row_bytes gives {sizes[0]}, not {sizes[1]}"
    )
    again = _round_trip(codec, values.reshape(1, -1)).view(values.shape)
    same = torch.allclose(decoded, again, rtol=0, atol=0, equal_nan=True)
    assert same, f"{codec.name}: what comes back depends on a block's shape"


def _check_rows(codec: Codec, values: Tensor, decoded: Tensor) -> None:
    """Each row alone gives the same, within the bound: an implementation may treat large blocks otherwise."""
    again = torch.cat([_round_trip(codec, row[None]) for row in values])
    bound = 2 * torch.cat([codec.error_bound(row[None]) for row in values]).double()
    near = ((decoded.double() - again.double()).abs() <= bound) | ~values.isfinite().all(1, keepdim=True)
    assert near.all(), f"{codec.name}: what comes back depends on other rows"


def _round_trip(codec: Codec, values: Tensor) -> Tensor:
    """Through bytes and back, with strangers' bytes and values on all sides."""
    rows, columns = values.shape
    wide = values.new_full((rows, columns + 2 * _SIDE), 7.0)
    wide[:, _SIDE:-_SIDE] = values
    size = rows * codec.row_bytes(columns)
    room = torch.full((size + 8,), _GUARD, dtype=torch.uint8, device=values.device)
    encoded = room[:size].view(rows, codec.row_bytes(columns))
    before = wide.clone()
    codec.encode(wide[:, _SIDE:-_SIDE], encoded)
    assert torch.equal(wide.nan_to_num(), before.nan_to_num()), f"{codec.name}: encode changed its input"
    assert (room[size:] == _GUARD).all(), f"{codec.name}: encode wrote behind its rows"
    codec.decode(encoded, wide[:, _SIDE:-_SIDE])
    sides = torch.cat([wide[:, :_SIDE], wide[:, -_SIDE:]], dim=1)
    assert (sides == 7.0).all(), f"{codec.name}: decode wrote beside its rows"
    return wide[:, _SIDE:-_SIDE].contiguous()
