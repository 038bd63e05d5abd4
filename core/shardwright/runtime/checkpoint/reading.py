"""Reading of stored tensors into blocks, piece by piece, so that no more than one piece is beside the blocks.

Legend: R rows of a whole tensor; N rows of a block.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from shardwright.errors import CheckpointError
from shardwright.runtime.checkpoint.metadata import (
    MANIFEST,
    METADATA,
    Manifest,
    StoredFile,
    measured,
    metadata_from,
    reason_of,
)

Ints: TypeAlias = npt.NDArray[np.int64]
NOWHERE = -1  # place of a row that no file has


class Sink(Protocol):
    """A receiver of a part of a stored piece."""

    def __call__(self, part: Tensor) -> None:
        """Take the part, which is read again for nobody."""


@frozen(eq=False)
class PieceRequest:
    """A part of a stored piece that is wanted.

    Args:
        index: the piece.
        offsets: first element in it, by dimension.
        lengths: elements, by dimension.
        sink: receiver of the part.
    """

    index: MetadataIndex
    offsets: Sequence[int]
    lengths: Sequence[int]
    sink: Sink

    def part_of(self, piece: Tensor) -> Tensor:
        """The part."""
        for dim, (start, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            piece = piece.narrow(dim, start, length)
        return piece


class StoredCheckpoint:
    """A checkpoint in a folder: ours, or one that DCP alone wrote.

    Args:
        path: its folder.

    Attributes:
        manifest: its description; ``None`` for one that DCP alone wrote.
        metadata: DCP's.

    Raises:
        CheckpointError: it is damaged, or there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = (path / MANIFEST).read_text() if (path / MANIFEST).exists() else None
            data = (path / METADATA).read_bytes()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
        self.manifest = None if text is None else Manifest.from_json(text, str(path / MANIFEST))
        if self.manifest is not None:
            self._check_file(METADATA)
        self.metadata: Metadata = metadata_from(data, str(path / METADATA))
        self._places: Mapping[MetadataIndex, Any] = self.metadata.storage_data
        for name in self.files:
            self._check_length(name)

    @property
    def entries(self) -> Mapping[str, TensorStorageMetadata | BytesStorageMetadata]:
        """Metadata of the stored entries, by name."""
        return self.metadata.state_dict_metadata

    @property
    def files(self) -> list[str]:
        """The files that have a checksum."""
        return sorted(self.manifest.files) if self.manifest is not None else []

    def verify(self, files: Iterable[str], progress: Callable[[int], None] = lambda count: None) -> None:
        """Check files against their checksums.

        Args:
            files: names among :attr:`files`.
            progress: function called with the bytes read since the last call.

        Raises:
            CheckpointError: a file is missing, cut short or altered.
        """
        for name in files:
            self._check_file(name, progress)

    def _check_file(self, name: str, progress: Callable[[int], None] = lambda count: None) -> None:
        wanted, path = self._check_length(name), self.path / name
        try:
            found = measured(path, progress)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}{self._holds(name)}") from error
        if found != wanted:
            raise CheckpointError(
                f"{path} was altered since it was written: its checksum is another{self._holds(name)}"
            )

    def _check_length(self, name: str) -> StoredFile:
        """Check the length of a file; return the manifest's record of it."""
        assert self.manifest is not None  # which lists the files
        wanted, path = self.manifest.files.get(name), self.path / name
        if wanted is None:
            raise CheckpointError(f"{self.path / MANIFEST} does not list {name}")
        try:
            length = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}{self._holds(name)}") from error
        if length != wanted.bytes:
            raise CheckpointError(
                f"{path} has {length} bytes; {wanted.bytes} were written{self._holds(name)}"
            )
        return wanted

    def _holds(self, name: str) -> str:
        """Describe the entries in a file, for errors."""
        if not hasattr(self, "_places"):
            return ""
        keys = sorted({index.fqn for index, info in self._places.items() if info.relative_path == name})
        return (
            f". It has parts of {len(keys)} entries, {', '.join(map(repr, keys[:3]))} among them"
            if keys
            else ""
        )

    def plain(self, key: str) -> Any:
        """An entry that is no tensor."""
        place = self._places.get(MetadataIndex(key))
        if place is None:
            raise CheckpointError(f"{self.path} has no place for its entry {key!r}")
        with self._stream(place.relative_path, key) as file:
            file.seek(place.offset)
            return self._loaded(io.BytesIO(file.read(place.length)), key, place)

    def _stream(self, name: str, key: str) -> Any:
        try:
            return (self.path / name).open("rb")
        except OSError as error:
            raise CheckpointError(
                f"{key!r} is in {self.path / name}, which cannot be read: {error}"
            ) from error

    def _loaded(self, file: Any, key: str, place: Any) -> Any:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever bytes can make of torch's reader
            raise CheckpointError(
                f"{key!r} cannot be read from {self.path / place.relative_path}, {place.length} bytes at "
                f"{place.offset}: {type(error).__name__}: {reason_of(error)}"
            ) from error

    def read(self, requests: Iterable[PieceRequest]) -> None:
        """Read parts of pieces, each piece once, in the order of the files.

        Raises:
            CheckpointError: a file cannot be read, or has something else.
        """
        by_piece: dict[MetadataIndex, list[PieceRequest]] = {}
        for request in requests:
            by_piece.setdefault(request.index, []).append(request)
        for index in by_piece:
            if index not in self._places:
                raise CheckpointError(
                    f"{self.path} has no place for the piece {index.offset} of {index.fqn!r}"
                )
        order = sorted(
            by_piece, key=lambda index: (self._places[index].relative_path, self._places[index].offset)
        )
        for index in order:
            piece = self._piece(index)
            for request in by_piece[index]:
                request.sink(request.part_of(piece))

    def _piece(self, index: MetadataIndex) -> Tensor:
        place, entry = self._places[index], self.entries[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        with self._stream(place.relative_path, index.fqn) as file:
            piece = self._loaded(_create_file_view(file, place.offset, place.length), index.fqn, place)
        chunk = next(chunk for chunk in entry.chunks if _is_at(chunk, index))
        if not isinstance(piece, Tensor) or piece.shape != chunk.sizes:
            shape = list(piece.shape) if isinstance(piece, Tensor) else type(piece).__name__
            raise CheckpointError(
                f"{self.path / place.relative_path} has {shape} for {index.fqn!r} at {index.offset}, not "
                f"{list(chunk.sizes)}"
            )
        return piece


def _is_at(chunk: ChunkStorageMetadata, index: MetadataIndex) -> bool:
    return index.offset is None or tuple(chunk.offsets) == tuple(index.offset)


def box_requests(
    key: str, entry: TensorStorageMetadata, values: Tensor, offsets: Sequence[int]
) -> Iterator[PieceRequest]:
    """The parts of what is stored that fill a box of it.

    Args:
        key: the entry's name.
        entry: metadata of the stored tensor.
        values: the box, filled in place.
        offsets: its first element, by dimension.
    """
    box = ChunkStorageMetadata(torch.Size(offsets), values.shape)
    for item in create_read_items_for_chunk_list(key, entry, [box]):
        target = values
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        yield PieceRequest(item.storage_index, item.storage_offsets, item.lengths, _Copied(target))


@frozen(eq=False)
class _Copied:
    target: Tensor

    def __call__(self, part: Tensor) -> None:
        with torch.no_grad():
            self.target.copy_(part)


def row_requests(
    key: str, entry: TensorStorageMetadata, values: Tensor, rows: Ints, first_column: int
) -> Iterator[PieceRequest]:
    """The parts of what is stored that have some rows, wherever they are.

    Args:
        key: the entry's name.
        entry: metadata of the stored tensor, ``[R, C]``.
        values: ``[N, columns]``, filled in place where a row is stored.
        rows: the stored row of each, or :data:`NOWHERE`: ``[N]``.
        first_column: first of the columns in the stored tensor.
    """
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    last_column = first_column + values.shape[1]
    for chunk in entry.chunks:
        row, column = chunk.offsets
        low, high = np.searchsorted(ordered, [row, row + chunk.sizes[0]])
        start, stop = max(column, first_column), min(column + chunk.sizes[1], last_column)
        if low == high or start >= stop:
            continue
        first, last = int(ordered[low]), int(ordered[high - 1]) + 1
        sink = _Dealt(
            values[:, start - first_column : stop - first_column],
            torch.from_numpy(order[low:high]),
            torch.from_numpy(ordered[low:high] - first),
        )
        index = MetadataIndex(key, chunk.offsets)
        yield PieceRequest(index, (first - row, start - column), (last - first, stop - start), sink)


@frozen(eq=False)
class _Dealt:
    """Rows of a part that go to rows of a block."""

    target: Tensor
    local: Tensor
    source: Tensor

    def __call__(self, part: Tensor) -> None:
        with torch.no_grad():
            rows = part[self.source]
            self.target[self.local.to(self.target.device)] = rows.to(self.target.device, self.target.dtype)


@frozen(eq=False)
class Found:
    """Collects, from an index of rows or keys that is read piece by piece, where those of one block are.

    Args:
        is_mine: function that tells for each number if it is the block's.
    """

    is_mine: Callable[[Ints], npt.NDArray[np.bool_]]
    _numbers: list[Ints] = field(factory=list, init=False)
    _places: list[Ints] = field(factory=list, init=False)

    def requests(self, key: str, entry: TensorStorageMetadata) -> Iterator[PieceRequest]:
        """All pieces of the index."""
        for chunk in entry.chunks:
            sink = _Looked(self, chunk.offsets[0])
            yield PieceRequest(MetadataIndex(key, chunk.offsets), (0, 0), chunk.sizes, sink)

    def look(self, numbers: Ints, first: int) -> None:
        """Take those of a piece."""
        mine = np.flatnonzero(self.is_mine(numbers))
        self._numbers.append(numbers[mine])
        self._places.append(mine + first)

    @property
    def numbers(self) -> Ints:
        """The block's rows or keys, as they are stored."""
        return np.concatenate([*self._numbers, np.empty(0, np.int64)])

    @property
    def places(self) -> Ints:
        """The stored row of each."""
        return np.concatenate([*self._places, np.empty(0, np.int64)])


@frozen(eq=False)
class _Looked:
    found: Found
    first: int

    def __call__(self, part: Tensor) -> None:
        self.found.look(part.reshape(-1).numpy().astype(np.int64, copy=False), self.first)
