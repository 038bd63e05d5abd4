"""Alignment and joining of the flat buffers that travel between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 8
"""Bytes to whose multiples sections of a buffer are aligned, so that each may be viewed as numbers."""


Bytes = TypeVar("Bytes", int, npt.NDArray[np.int64])


def padded(num_bytes: Bytes) -> Bytes:
    """Round a section's bytes up to the alignment of the next section."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate flat pieces; large ones that already stand so in memory are viewed instead of copied."""
    size = sum([piece.numel() for piece in pieces])
    if len(pieces) == 1 or (size >= _LARGE and _stand_in_a_row(pieces)):
        return pieces[0].as_strided((size,), (1,))
    return torch.cat(list(pieces))


_LARGE = 1 << 16  # elements; less is copied in the time that looking takes


def _stand_in_a_row(pieces: Sequence[Tensor]) -> bool:
    """True if each piece begins, in the same storage, where the one before ends; empty pieces do not count."""
    storage = pieces[0].untyped_storage().data_ptr()
    place = pieces[0].data_ptr()
    for piece in pieces:
        if piece.numel() == 0 and piece is not pieces[0]:
            continue
        if piece.data_ptr() != place or piece.untyped_storage().data_ptr() != storage:
            return False
        if not piece.is_contiguous():
            return False
        place += piece.numel() * piece.element_size()
    return True
