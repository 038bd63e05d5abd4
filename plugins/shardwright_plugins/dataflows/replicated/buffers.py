"""Alignment of the flat buffers that travel between ranks."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

ALIGNMENT = 8
"""Bytes to whose multiples sections of a buffer are aligned, so that each may be viewed as numbers."""


Bytes = TypeVar("Bytes", int, npt.NDArray[np.int64])


def padded(num_bytes: Bytes) -> Bytes:
    """Round a section's bytes up to the alignment of the next section."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
