"""The check for authors of codecs finds what is wrong with a codec; more of it in `conformance/mistakes`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.runtime.exact_codecs import Doubles, Mirrored

from shardwright_testing.codecs import check_codec

VALUES = torch.arange(12.0).view(4, 3) - 5


class WritesBehind(Doubles):
    def encode(self, values, encoded):
        super().encode(values, encoded)
        torch.as_strided(encoded, (1,), (1,), encoded.storage_offset() + encoded.numel()).fill_(0)


class WritesBeside(Doubles):
    def decode(self, encoded, values):
        super().decode(encoded, values)
        torch.as_strided(values, (1,), (1,), values.storage_offset() - 1).fill_(0)


class DependsOnOtherRows(Mirrored):
    def decode(self, encoded, values):
        super().decode(encoded, values)
        values += 0.5 * (values.shape[0] > 1)

    def error_bound(self, values):
        return torch.full_like(values, 0.1 if values.shape[0] == 1 else 1.0)


class ForgetsItsShape(Doubles):
    """Says that it is elementwise, and is not."""

    def decode(self, encoded, values):
        super().decode(encoded, values)
        values *= values.shape[0]

    def error_bound(self, values):
        return torch.full_like(values, 100.0)


class HasAHeader(Doubles):
    """Elementwise but for 8 bytes before each row."""

    def row_bytes(self, num_columns):
        return 8 * num_columns + 8

    def encode(self, values, encoded):
        encoded[:, 8:] = (-values.double()).view(torch.uint8)

    def decode(self, encoded, values):
        values.copy_(-encoded[:, 8:].reshape(-1).clone().view(torch.float64).view(values.shape))


@settings(max_examples=100)
@given(st.integers(0, 4), st.integers(1, 6), st.integers(0, 1000))
def test_check_codec_gives_back_what_exact_codecs_give(rows, columns, seed):
    values = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
    for codec in (Doubles(), Mirrored()):
        assert torch.equal(check_codec(codec, values), values)


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        (WritesBehind, "encode wrote behind its rows"),
        (WritesBeside, "decode wrote beside its rows"),
        (DependsOnOtherRows, "what comes back depends on other rows"),
        (HasAHeader, "is elementwise, but row_bytes gives 104, not 192"),
        (ForgetsItsShape, "what comes back depends on a block's shape"),
    ],
)
def test_check_codec_finds_what_breaks_the_contract(codec, told):
    with pytest.raises(AssertionError, match=told):
        check_codec(codec(), VALUES.clone())
