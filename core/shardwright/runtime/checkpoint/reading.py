"""Reading of stored tensors into blocks, piece by piece, so that no more than one piece is beside the blocks.

Legend: R rows of a whole tensor; N rows of a block.
"""

from __future__ import annotations

import io
import math
import os
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

from shardwright.errors import CheckpointError, nearest
from shardwright.runtime.checkpoint.entries import MODEL, STATE
from shardwright.runtime.checkpoint.folder import find_checkpoint
from shardwright.runtime.checkpoint.metadata import (
    MANIFEST,
    METADATA,
    Manifest,
    StoredFile,
    measured,
    metadata_from,
    reason_of,
)
from shardwright.runtime.sharded.tables.table_state import STORED, STORED_ROWS

Ints: TypeAlias = npt.NDArray[np.int64]
NOWHERE = -1  # place of a row that no file has

_LARGE_BYTES = 1 << 20
"""Length from which a piece is read row by row, and not as one tensor."""

_SLAB_BYTES = 1 << 20
"""Bytes that are read at once of such a piece: they stay in a core's second cache until they are copied."""


class Sink(Protocol):
    """A receiver of a part of a stored piece."""

    def __call__(self, part: Tensor, first: int) -> None:
        """Take a part, whose memory is used again afterwards.

        Args:
            part: some of the rows that are wanted, or all.
            first: number of its first row among them.
        """


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

    def take(self, slab: Tensor, start: int) -> None:
        """Hand on what is wanted of some rows of the piece.

        Args:
            slab: the rows; the whole piece if it has no dimensions.
            start: number of their first row in the piece.
        """
        if not slab.dim():
            self.sink(slab, 0)
            return
        first = max(self.offsets[0], start)
        last = min(self.offsets[0] + self.lengths[0], start + slab.shape[0])
        if first < last:
            part = slab[first - start : last - start]
            for dim, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
                part = part.narrow(dim, offset, length) if dim else part
            self.sink(part, first - self.offsets[0])


@frozen(eq=False)
class StoredTensor:
    """A tensor of a checkpoint, with its rows in order, whatever plan saved it.

    Args:
        shape: its shape.
        dtype: dtype of its elements.
        read: function that fills a tensor with its rows from a number on: ``read(rows, start)``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Tensor, int], None]


def open_checkpoint(
    path: str | os.PathLike[str], step: int | None = None, *, dcp_only: bool = False
) -> StoredCheckpoint:
    """Open a checkpoint, to read tensors of it without a model.

    Args:
        path: a checkpoint, or a folder of them.
        step: its step; the newest by default.
        dcp_only: ``torch.distributed.checkpoint`` alone wrote it, so that there is no manifest.

    Raises:
        CheckpointError: it is damaged, or there is none.
    """
    return StoredCheckpoint(find_checkpoint(Path(path), step), dcp_only=dcp_only)


class StoredCheckpoint:
    """A checkpoint in a folder: ours, or one that DCP alone wrote.

    Names are ``model.`` and the name in the unsharded model's state dict, and ``optimizer.state.``, a parameter's name
    and that of one of its states. Tables of keys have entries beside ``weight``, and rows in no order.

    Args:
        path: its folder.
        dcp_only: DCP alone wrote it, so that there is no manifest.

    Attributes:
        manifest: its description; ``None`` for one that DCP alone wrote.
        metadata: DCP's.

    Raises:
        CheckpointError: it is damaged, or there is none.
    """

    def __init__(self, path: Path, *, dcp_only: bool = False) -> None:
        self.path = path
        if not (dcp_only or (path / MANIFEST).exists()) and (path / METADATA).exists():
            raise CheckpointError(
                f"{path / MANIFEST} is missing, without which no file can be checked. Where "
                "torch.distributed.checkpoint alone wrote the folder, say so: load_checkpoint(..., dcp_only=True), or "
                "make a checkpoint of it by `shardwright checkpoint convert`",
                subject=str(path / MANIFEST),
            )
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

    def tensor(self, key: str) -> StoredTensor:
        """A tensor of that name, none of which is read yet.

        Raises:
            CheckpointError: there is none.
        """
        by_index = f"{key}.{STORED}" in self.entries
        name = f"{key}.{STORED}" if by_index else key
        entry = self.entries.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.path} has no tensor {key!r}.{nearest(key, self.entries)}")
        shape, dtype = tuple(entry.size), entry.properties.dtype
        if not by_index:
            return StoredTensor(
                shape,
                dtype,
                lambda rows, start: self.read(
                    box_requests(key, entry, rows, (start, *[0] * (rows.dim() - 1))[: rows.dim()])
                ),
            )
        places = self._places_of_rows(key)
        return StoredTensor(
            shape,
            dtype,
            lambda rows, start: self.read(
                row_requests(name, entry, rows, places[start : start + len(rows)], 0)
            ),
        )

    def _places_of_rows(self, key: str) -> Ints:
        """The stored row of each row of a table that is stored by an index: ``[R]``."""
        name = (
            key.removeprefix(MODEL) if key.startswith(MODEL) else key.removeprefix(STATE).rpartition(".")[0]
        )
        index = f"{MODEL}{name}.{STORED_ROWS}"
        entry = self.entries.get(index)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{self.path} has {key!r} in the order of an index, {index!r}, but not the index"
            )
        found = Found(lambda rows: np.ones(len(rows), bool))
        self.read(found.requests(index, entry))
        return found.places[np.argsort(found.numbers, kind="stable")]

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

    def _loaded(self, file: Any, key: str, place: Any, *, device: str = "cpu") -> Any:
        try:
            return torch.load(file, map_location=device, weights_only=True)
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
            for start, slab in self._slabs(index, *_rows_wanted(by_piece[index])):
                for request in by_piece[index]:
                    request.take(slab, start)

    def _slabs(self, index: MetadataIndex, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """The rows of a piece in order, some at a time in the same memory, and the number of the first of them.

        Args:
            index: the piece.
            first: first row that is wanted; a small piece is read as a whole.
            last: row after the last that is wanted.
        """
        place, chunk = self._places[index], self._chunk(index)
        with self._stream(place.relative_path, index.fqn) as file:
            outline = self._outline(file, index) if place.length >= _LARGE_BYTES else None
            if outline is None:
                yield 0, self._piece(file, index)
                return
            at, dtype = outline
            row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
            slab = torch.empty((max(1, _SLAB_BYTES // row_bytes), *chunk.sizes[1:]), dtype=dtype)
            for start in range(first, last, len(slab)):
                rows = slab[: last - start]
                data = memoryview(rows.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                file.seek(at + start * row_bytes)
                if _filled(file, data) != len(data):
                    raise CheckpointError(
                        f"{self.path / place.relative_path} ends in the midst of {index.fqn!r}"
                    )
                yield start, rows

    def _outline(self, file: Any, index: MetadataIndex) -> tuple[int, torch.dtype] | None:
        """Place in its file at which the elements of a piece begin, and their dtype; ``None`` if not row after row."""
        place, chunk = self._places[index], self._chunk(index)
        view = _create_file_view(file, place.offset, place.length)
        # torch reads no elements of a tensor without memory, and says where they are.
        piece = self._loaded(view, index.fqn, place, device="meta")
        at = (
            getattr(piece.untyped_storage(), "_checkpoint_offset", None)
            if isinstance(piece, Tensor)
            else None
        )
        if (
            at is None
            or piece.shape != chunk.sizes
            or not piece.is_contiguous()
            or not (piece.dim() and piece.numel())
        ):
            return None
        at += piece.storage_offset() * piece.dtype.itemsize
        return (place.offset + at, piece.dtype) if 0 <= at <= place.length - piece.nbytes else None

    def _chunk(self, index: MetadataIndex) -> ChunkStorageMetadata:
        entry = self.entries[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return next(chunk for chunk in entry.chunks if _is_at(chunk, index))

    def _piece(self, file: Any, index: MetadataIndex) -> Tensor:
        place, chunk = self._places[index], self._chunk(index)
        piece = self._loaded(_create_file_view(file, place.offset, place.length), index.fqn, place)
        if not isinstance(piece, Tensor) or piece.shape != chunk.sizes:
            shape = list(piece.shape) if isinstance(piece, Tensor) else type(piece).__name__
            raise CheckpointError(
                f"{self.path / place.relative_path} has {shape} for {index.fqn!r} at {index.offset}, not "
                f"{list(chunk.sizes)}"
            )
        return piece


def _rows_wanted(requests: Sequence[PieceRequest]) -> tuple[int, int]:
    """First row of a piece that one of the requests wants, and the row after the last; no rows without dimensions."""
    rows = [(request.offsets[0], request.lengths[0]) for request in requests if len(request.offsets)]
    return min((first for first, _ in rows), default=0), max((sum(pair) for pair in rows), default=0)


def _filled(file: Any, data: memoryview) -> int:
    """Read into memory from where a file stands; gives the bytes read, fewer where it ends."""
    done = 0
    while done < len(data) and (count := file.readinto(data[done:])):
        done += count
    return done


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

    def __call__(self, part: Tensor, first: int) -> None:
        target = self.target.narrow(0, first, part.shape[0]) if part.dim() else self.target
        with torch.no_grad():
            target.copy_(part)


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
    """Rows of a part that go to rows of a block.

    Args:
        target: the block.
        local: row of the block for each row of the part that is wanted.
        source: rows of the part that are wanted, rising.
    """

    target: Tensor
    local: Tensor
    source: Tensor

    def __call__(self, part: Tensor, first: int) -> None:
        bounds = torch.tensor([first, first + part.shape[0]])
        low, high = torch.searchsorted(self.source, bounds).tolist()
        with torch.no_grad():
            rows = part[self.source[low:high] - first]
            local = self.local[low:high].to(self.target.device)
            self.target[local] = rows.to(self.target.device, self.target.dtype)


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

    def __call__(self, part: Tensor, first: int) -> None:
        self.found.look(part.reshape(-1).numpy().astype(np.int64, copy=False), self.first + first)
