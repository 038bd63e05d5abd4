"""Bytes in one row: what all flat buffers between ranks have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 8
"""Sections of a buffer begin at multiples of so many bytes, so that each may be viewed as numbers."""


def padded(num_bytes: int) -> int:
    """The bytes that a section takes with what aligns the next one."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces one after the other; a single one as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
