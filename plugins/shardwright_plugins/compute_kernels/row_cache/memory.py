"""The memory that whole tables are in, while a cache has the rows in use: a mapped file, or pinned memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.planning.text import bytes_text

FOLDER_VARIABLE = "SHARDWRIGHT_MAPPED_FOLDER"
"""Environment variable: the folder of files that tables are mapped from; that of temporary files if it is not set."""


def kept_for(
    device: torch.device, num_rows: int, columns: int, dtype: torch.dtype, initial: float = 0.0
) -> Tensor:
    """Equal values ``[num_rows, columns]`` in the memory behind a device's own.

    Behind the CPU's is a file that is mapped into memory; behind any other's is the CPU's, pinned.
    """
    if device.type == "cpu":
        kept = _mapped(num_rows, columns, dtype)
    else:
        kept = torch.zeros(num_rows, columns, dtype=dtype, device="cpu", pin_memory=True)
    return kept.fill_(initial) if initial else kept  # zeros of a file take no space before they are written


def _mapped(num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros in a file that has no name and ends with the last tensor over it."""
    size = num_rows * columns * dtype.itemsize
    if not size:
        return torch.zeros(num_rows, columns, dtype=dtype, device="cpu")
    folder = mapped_folder()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Space is taken now: writing to a mapped file on a disk that is full would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UnsupportedError(
            f"no file of {bytes_text(size)} for rows in {str(folder)!r}: {error}. Name a folder with room that may be "
            f"written into in {FOLDER_VARIABLE}."
        ) from error
    # Rows are read here and there: pages around them would be read for nothing.
    mapped.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(mapped, dtype=dtype).view(num_rows, columns)


def mapped_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder for mapped files.

    Raises:
        InvalidInputError: there is no such folder.
    """
    folder = Path(environment.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    if not folder.is_dir():
        raise InvalidInputError(
            f"{FOLDER_VARIABLE} is {str(folder)!r}, which is no folder; name one on a local disk"
        )
    return folder
