"""Files of a checkpoint, in any file system of DCP's: a disk, or what fsspec knows, object stores among them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from attrs import frozen
from torch.distributed.checkpoint.filesystem import FileSystemBase

from shardwright.errors import CheckpointError

_BUFFER_BYTES = 4 << 20  # bytes of a file that are read at once

_AT_ONCE_BYTES = 1 << 20
"""Bytes that are summed and written at once: they stay in a core's second cache meanwhile."""


@frozen
class StoredFile:
    """A file of a checkpoint.

    Args:
        bytes: its length.
        crc32: checksum of all its bytes.
    """

    bytes: int
    crc32: int


class _Stream:
    """A stream that sums up what is written to it, and keeps the error of a write.

    The archives of ``torch.save`` end in another error, of their own.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.stored = stream, StoredFile(0, 0)
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if not self._stream.closed:  # torch's writer flushes when it is collected, after a failure too
            self._stream.flush()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _AT_ONCE_BYTES):
            piece = view[start : start + _AT_ONCE_BYTES]
            try:
                self._stream.write(piece)
            except OSError as error:
                self.error = error
                raise
            self.stored = StoredFile(self.stored.bytes + len(piece), zlib.crc32(piece, self.stored.crc32))
        return len(view)

    def tell(self) -> int:
        return self.stored.bytes


@contextmanager
def writing(path: Any, opened: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    """A context with an open file, whose errors name it, and whose ``stored`` is its length and checksum.

    Args:
        path: the file.
        opened: function that opens it.

    Raises:
        CheckpointError: it cannot be written, as on a full disk.
    """
    stream = None
    try:
        with opened() as own:
            stream = _Stream(own)
            yield stream
    except (OSError, RuntimeError) as error:
        cause = (stream and stream.error) or error
        if not isinstance(cause, OSError):
            raise
        raise CheckpointError(f"{path} cannot be written: {cause}", subject=str(path)) from cause


def name_of(storage: Any) -> str:
    """The name by which errors call a storage: its checkpoint_id, or its class."""
    return str(getattr(storage, "checkpoint_id", type(storage).__name__))


@frozen
class StoredFiles:
    """The files of one checkpoint.

    Args:
        fs: their file system.
        root: their folder.
    """

    fs: FileSystemBase
    root: str | os.PathLike[str]

    @classmethod
    def of(cls, storage: Any) -> StoredFiles | None:
        """Those of a storage reader or writer; ``None`` if it has no files."""
        fs = getattr(storage, "fs", None)
        return cls(fs, storage.path) if isinstance(fs, FileSystemBase) else None

    def path(self, name: str) -> str:
        """The path of a file."""
        return str(self.fs.concat_path(self.root, name))

    def open(self, name: str, mode: str) -> AbstractContextManager[Any]:
        """A context with a file's stream."""
        return self.fs.create_stream(self.fs.concat_path(self.root, name), mode)

    def exists(self, name: str) -> bool:
        """True if there is such a file."""
        return self.fs.exists(self.fs.concat_path(self.root, name))

    def read(self, name: str) -> bytes:
        """All of a file."""
        with self.open(name, "rb") as file:
            return bytes(file.read())

    def length(self, name: str) -> int:
        """Length of a file in bytes."""
        with self.open(name, "rb") as file:
            return int(file.seek(0, os.SEEK_END))

    def measured(self, name: str, progress: Callable[[int], None] = lambda count: None) -> StoredFile:
        """Length and checksum of a file.

        Args:
            name: the file.
            progress: function called with the bytes read since the last call.
        """
        crc, length, buffer = 0, 0, bytearray(_BUFFER_BYTES)
        with self.open(name, "rb") as file:
            while count := file.readinto(buffer):
                crc = zlib.crc32(memoryview(buffer)[:count], crc)
                length += count
                progress(count)
        return StoredFile(length, crc)
