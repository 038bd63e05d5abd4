"""Digests of rows, by which those that changed are found.

Legend: R rows, W words of 32 bits of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints: TypeAlias = npt.NDArray[np.int64]

LANES = 2
"""Numbers of 64 bits in a digest."""

_ELEMENTS_AT_ONCE = 1 << 18
"""Words that are multiplied at once, so that they stay in a core's cache."""


def digests(values: Iterable[Tensor]) -> Ints:
    """Hash each row of some tensors that have the same rows: ``[R, 2]``.

    A multilinear hash (Carter and Wegman 1979; Lemire and Kaser 2014): the sum of a row's words, each times a drawn
    number of 64 bits, modulo 2^64. Rows of which a word differs by an odd multiple of 2^k, k < 32, have equal sums with
    probability 2^(k - 64), at most 2^-33. There are two independent sums.

    Args:
        values: tensors ``[R, columns]`` of any dtype, on any device.
    """
    drawn = np.random.default_rng(0)
    return np.sum([_sums(value.detach(), drawn) for value in values], axis=0, dtype=np.int64)


def _sums(value: Tensor, drawn: np.random.Generator) -> Ints:
    """Add up the words of each row, times numbers that are drawn for this tensor: ``[R, 2]``."""
    num_rows, num_words = len(value), -(-value.shape[1] * value.itemsize // 4)
    factors = drawn.integers(-(1 << 63), (1 << 63) - 1, size=(num_words, LANES), endpoint=True)
    sums = np.empty((num_rows, LANES), dtype=np.int64)
    at_once = max(1, _ELEMENTS_AT_ONCE // num_words)
    for start in range(0, num_rows, at_once):
        # A copy, since rows that a store has are read so.
        octets = (
            value[start : start + at_once]
            .clone(memory_format=torch.contiguous_format)
            .cpu()
            .view(torch.uint8)
        )
        padded = torch.nn.functional.pad(octets, (0, 4 * num_words - octets.shape[1]))
        sums[start : start + at_once] = padded.view(torch.int32).numpy().astype(np.int64) @ factors
    return sums
