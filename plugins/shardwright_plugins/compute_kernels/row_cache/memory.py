"""The memory that whole tables are in, while a cache has the rows in use: a mapped file, or pinned memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.planning.text import bytes_text

Bytes: TypeAlias = npt.NDArray[np.uint8]
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process

FOLDER_VARIABLE = "SHARDWRIGHT_MAPPED_FOLDER"
"""Environment variable: the folder of files that tables are mapped from; that of temporary files if it is not set."""


def kept_for(
    device: torch.device, num_rows: int, columns: int, dtype: torch.dtype, initial: float = 0.0
) -> Tensor:
    """Equal values ``[num_rows, columns]`` in the memory behind a device's own.

    Behind the CPU's is a file that is mapped into memory; behind any other's is the CPU's, pinned.
    """
    size = num_rows * columns * dtype.itemsize
    if not size:
        return torch.zeros(num_rows, columns, dtype=dtype, device="cpu")
    memory = _mapped(size) if device.type == "cpu" else _pinned(size)
    kept = torch.from_numpy(memory).view(dtype).view(num_rows, columns)
    return kept.fill_(initial) if initial else kept  # zeros of a file take no space before they are written


def _mapped(size: int) -> Bytes:
    """Zeros in a file that has no name and ends with the last tensor over it."""
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
    return np.frombuffer(mapped, dtype=np.uint8)


def _pinned(size: int) -> Bytes:
    """Zeros in page-locked memory of that size, let go with the last tensor over it.

    torch's own allocator of pinned memory takes the next power of two: 8 GiB for a table of 5. Pages are shared ones,
    as a file's are: those of a process that forks would be copied when it writes, and the device know the old ones.

    Raises:
        UnsupportedError: so much memory is not there, or may not be locked.
    """
    runtime, refused = torch.cuda.cudart(), ""
    try:
        mapped = mmap.mmap(-1, size)
        memory = np.frombuffer(mapped, dtype=np.uint8)
        address = memory.ctypes.data
        if code := int(runtime.cudaHostRegister(address, size, _PORTABLE)):
            refused = f"cudaHostRegister answers with error {code}"
    except OSError as error:
        refused = str(error)
    if refused:
        raise UnsupportedError(
            f"{bytes_text(size)} of the host's memory for rows cannot be pinned: {refused}. That much must be free, "
            "and be allowed to be locked (ulimit -l); tables cut over more hosts need less on each."
        )
    # The call holds the pages, so that they are there until they are unregistered.
    weakref.finalize(memory, _unpin, runtime, address, mapped).atexit = False
    return memory


def _unpin(runtime: Any, address: int, mapped: mmap.mmap) -> None:
    runtime.cudaHostUnregister(address)


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
