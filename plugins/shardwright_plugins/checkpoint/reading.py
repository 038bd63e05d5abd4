"""Reading of stored tensors into blocks by DCP's storage readers: a load planner asks for the parts that are wanted.

Pieces are read one after the other, so that one is in memory beside the blocks, and a copy of the part that is wanted.

Legend: R rows of a whole tensor; N rows of a block.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader

from shardwright.errors import CheckpointError, nearest
from shardwright_plugins.checkpoint.entries import MODEL, STATE
from shardwright_plugins.checkpoint.files import StoredFile, StoredFiles, name_of
from shardwright_plugins.checkpoint.folder import find_checkpoint
from shardwright_plugins.checkpoint.metadata import MANIFEST, METADATA, Manifest, metadata_from, reason_of
from shardwright_plugins.checkpoint.stored_order import STORED, STORED_ROWS

_Answer = TypeVar("_Answer")
Ints: TypeAlias = npt.NDArray[np.int64]
NOWHERE = -1  # place of a row that no file has


@frozen(eq=False)
class PieceRequest:
    """A part of a stored piece that is wanted.

    Args:
        index: the piece.
        offsets: first element in it, by dimension.
        lengths: elements, by dimension.
        take: function that receives the part, whose memory is used again afterwards.
        target: tensor that the part is copied into, in place of ``take``.
    """

    index: MetadataIndex
    offsets: Sequence[int]
    lengths: Sequence[int]
    take: Callable[[Tensor], None] = lambda part: None
    target: Tensor | None = None


class _PartPlanner(LoadPlanner):
    """A load planner that asks for the parts of pieces that are wanted, each piece once, in the order of the files.

    Args:
        requests: parts of tensors.
        plain: names of entries that are no tensors.

    Attributes:
        values: entries that are no tensors, by name.
        waiting: what was not read yet, in order.
    """

    def __init__(self, requests: Iterable[PieceRequest] = (), plain: Iterable[str] = ()) -> None:
        self._requests: dict[MetadataIndex, list[PieceRequest]] = {}
        for request in requests:
            self._requests.setdefault(request.index, []).append(request)
        self._plain = list(plain)
        self.values: dict[str, Any] = {}
        self.waiting: dict[MetadataIndex, ReadItem] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None  # as DCP calls it
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items = [_item(index, _box(own)) for index, own in self._requests.items()]
        items += [_item(MetadataIndex(key)) for key in self._plain]
        places = self._metadata.storage_data or {}

        def order(item: ReadItem) -> tuple[str, int]:
            place = places.get(item.storage_index)
            return getattr(place, "relative_path", ""), getattr(place, "offset", 0)

        self.waiting = {item.storage_index: item for item in sorted(items, key=order)}
        return LoadPlan(list(self.waiting.values()))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.storage_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)
        del self.waiting[read_item.storage_index]

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        own = self._requests[read_item.storage_index]
        if len(own) == 1 and own[0].target is not None:
            return own[0].target
        entry = self._metadata.state_dict_metadata[read_item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return torch.empty(read_item.lengths, dtype=entry.properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        own = self._requests[read_item.storage_index]
        for request in own:
            if tensor is not request.target:
                spans = zip(request.offsets, read_item.storage_offsets, request.lengths, strict=True)
                part = tensor[tuple(slice(at - first, at - first + count) for at, first, count in spans)]
                if request.target is None:
                    request.take(part)
                else:
                    request.target.copy_(part)
        del self.waiting[read_item.storage_index]


def _item(index: MetadataIndex, box: tuple[torch.Size, torch.Size] | None = None) -> ReadItem:
    offsets, lengths = box or (torch.Size([0]), torch.Size([0]))
    kind = LoadItemType.BYTE_IO if box is None else LoadItemType.TENSOR
    return ReadItem(kind, index, torch.Size([0] * len(offsets)), index, offsets, lengths)


def _box(requests: Sequence[PieceRequest]) -> tuple[torch.Size, torch.Size]:
    """The smallest box of a piece that has all that is wanted of it."""
    first = [min(starts) for starts in zip(*(request.offsets for request in requests), strict=True)]
    last = [
        max(map(sum, spans))
        for spans in zip(*(zip(r.offsets, r.lengths, strict=True) for r in requests), strict=True)
    ]
    return torch.Size(first), torch.Size(end - start for start, end in zip(first, last, strict=True))


@frozen(eq=False)
class StoredTensor:
    """A tensor of a checkpoint, with its rows in order, whatever plan saved it.

    Args:
        shape: its shape.
        dtype: dtype of its elements.
        read: function that fills a tensor with its rows from a number on: ``read(rows, start)``.

    Example:
        >>> import tempfile, shardwright as sw
        >>> bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])])
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = sw.save_checkpoint(folder, model, step=1)
        ...     rows = torch.empty(10, 8)  # rows 20 to 29
        ...     sw.open_checkpoint(folder).tensor("model.embedding_bags.item.weight").read(rows, 20)
        >>> torch.equal(rows, model.state_dict()["embedding_bags.item.weight"][20:30])
        True
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Tensor, int], None]


def open_checkpoint(
    path: str | os.PathLike[str] | StorageReader, step: int | None = None, *, dcp_only: bool = False
) -> StoredCheckpoint:
    """Open a checkpoint, to read tensors of it without a model.

    Args:
        path: a checkpoint, a folder of them, or a storage reader of ``torch.distributed.checkpoint`` with one.
        step: its step in the folder; the newest by default.
        dcp_only: ``torch.distributed.checkpoint`` alone wrote it, so that there is no manifest.

    Raises:
        CheckpointError: it is damaged, or there is none.

    Example:
        >>> import tempfile, shardwright as sw
        >>> bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])])
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = sw.save_checkpoint(folder, model, step=1)
        ...     stored = sw.open_checkpoint(folder)
    """
    reader = path if isinstance(path, StorageReader) else find_checkpoint(Path(path), step)
    return StoredCheckpoint(reader, dcp_only=dcp_only)


class StoredCheckpoint:
    """A checkpoint in any storage of DCP: ours, or one that DCP alone wrote.

    Names are ``model.`` and the name in the unsharded model's state dict, and ``optimizer.state.``, a parameter's name
    and that of one of its states. Tables of keys have entries beside ``weight``, and rows in no order.

    Args:
        source: its folder, or a storage reader. Of one that reads files, as ``FsspecReader`` does, the metadata are
            read without unpickling anything; another reads them itself, and its files have no checksums here.
        dcp_only: DCP alone wrote it, so that there is no manifest.

    Attributes:
        path: its folder, or the checkpoint_id of the reader.
        manifest: its description; ``None`` for one that DCP alone wrote.
        metadata: DCP's.

    Raises:
        CheckpointError: it is damaged, or there is none.

    Example:
        >>> import tempfile, shardwright as sw
        >>> bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])])
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = sw.save_checkpoint(folder, model, step=1)
        ...     rows = sw.open_checkpoint(folder).tensor("model.embedding_bags.item.weight")
        >>> rows.shape
        (100, 8)
    """

    def __init__(self, source: Path | StorageReader, *, dcp_only: bool = False) -> None:
        self._reader = source if isinstance(source, StorageReader) else FileSystemReader(source)
        self.path = name_of(self._reader) if isinstance(source, StorageReader) else source
        self._files = StoredFiles.of(self._reader)
        self.manifest: Manifest | None = None
        if self._files is None:
            self.metadata: Metadata = self._reader.read_metadata()
            return
        self._read_manifest(self._files, dcp_only=dcp_only)
        self.metadata = metadata_from(
            self._of(METADATA, lambda files: files.read(METADATA)), self._files.path(METADATA)
        )
        for name in self.files:
            self._check_length(name)

    def _read_manifest(self, files: StoredFiles, *, dcp_only: bool) -> None:
        where = files.path(MANIFEST)
        if files.exists(MANIFEST):
            self.manifest = Manifest.from_json(self._of(MANIFEST, lambda files: files.read(MANIFEST)), where)
            self._check_file(METADATA)
        elif not dcp_only and files.exists(METADATA):
            raise CheckpointError(
                f"{where} is missing, without which no file can be checked. Where "
                "torch.distributed.checkpoint alone wrote the folder, say so: load_checkpoint(..., dcp_only=True), or "
                "make a checkpoint of it by `shardwright checkpoint convert`",
                subject=where,
            )

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
        wanted = self._check_length(name)
        if self._of(name, lambda files: files.measured(name, progress)) != wanted:
            raise CheckpointError(
                f"{self.path}/{name} was altered since it was written: its checksum is another{self._holds(name)}"
            )

    def _check_length(self, name: str) -> StoredFile:
        """Check the length of a file; return the manifest's record of it."""
        assert self.manifest is not None  # which lists the files
        wanted = self.manifest.files.get(name)
        if wanted is None:
            raise CheckpointError(f"{self.path}/{MANIFEST} does not list {name}")
        length = self._of(name, lambda files: files.length(name))
        if length != wanted.bytes:
            raise CheckpointError(
                f"{self.path}/{name} has {length} bytes; {wanted.bytes} were written{self._holds(name)}"
            )
        return wanted

    def _of(self, name: str, ask: Callable[[StoredFiles], _Answer]) -> _Answer:
        assert self._files is not None  # whose manifest it is
        try:
            return ask(self._files)
        except OSError as error:
            raise CheckpointError(f"{self.path}/{name} cannot be read: {error}{self._holds(name)}") from error

    def _holds(self, name: str) -> str:
        """Describe the entries in a file, for errors."""
        if not hasattr(self, "metadata"):
            return ""
        places = self.metadata.storage_data.items()
        keys = sorted({index.fqn for index, info in places if info.relative_path == name})
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
        places = self.places_of_rows(index_of(key))
        return StoredTensor(
            shape,
            dtype,
            lambda rows, start: self.read(
                row_requests(name, entry, rows, places[start : start + len(rows)], 0)
            ),
        )

    def places_of_rows(self, index: str) -> Ints:
        """The stored row of each row of a table that is stored by an index: ``[R]``.

        Args:
            index: name of the index.
        """
        entry = self.entries.get(index)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{self.path} has rows in the order of an index, {index!r}, but not the index"
            )
        found = Found(lambda rows: np.ones(len(rows), bool))
        self.read(found.requests(index, entry))
        return found.places[np.argsort(found.numbers, kind="stable")]

    def plain(self, key: str) -> Any:
        """An entry that is no tensor."""
        return self._run(_PartPlanner(plain=[key])).values[key]

    def read(self, requests: Iterable[PieceRequest]) -> None:
        """Read parts of pieces, each piece once, in the order of the files.

        Raises:
            CheckpointError: a file cannot be read, or has something else.
        """
        self._run(_PartPlanner(requests))

    def _run(self, planner: _PartPlanner) -> _PartPlanner:
        """Read as ``dcp.load`` does on each rank; no rank has to know of the others' plans."""
        planner.set_up_planner({}, self.metadata)
        plan = planner.create_local_plan()
        try:
            self._reader.set_up_storage_reader(self.metadata, True)
            self._reader.read_data(self._reader.prepare_local_plan(plan), planner).wait()
        except Exception as error:  # whatever bytes can make of torch's reader
            if not planner.waiting:
                raise
            index = next(iter(planner.waiting))
            place = getattr((self.metadata.storage_data or {}).get(index), "relative_path", "")
            raise CheckpointError(
                f"{index.fqn!r} cannot be read from {self.path}/{place}: {type(error).__name__}: {reason_of(error)}"
            ) from error
        return planner


def index_of(key: str) -> str:
    """The name of the index by which a table's rows are stored, from that of its weight or a state of it."""
    weight = key if key.startswith(MODEL) else MODEL + key.removeprefix(STATE).rpartition(".")[0]
    return f"{weight}.{STORED_ROWS}"


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
        yield PieceRequest(item.storage_index, item.storage_offsets, item.lengths, target=target)


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
        take = partial(
            _deal,
            values[:, start - first_column : stop - first_column],
            torch.from_numpy(order[low:high]),
            torch.from_numpy(ordered[low:high] - first),
        )
        index = MetadataIndex(key, chunk.offsets)
        yield PieceRequest(index, (first - row, start - column), (last - first, stop - start), take)


def _deal(target: Tensor, local: Tensor, source: Tensor, part: Tensor) -> None:
    """Copy the rows ``source`` of a part to the rows ``local`` of a block."""
    target[local.to(target.device)] = part[source].to(target.device, target.dtype)


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
            take = partial(self._look, chunk.offsets[0])
            yield PieceRequest(MetadataIndex(key, chunk.offsets), (0, 0), chunk.sizes, take)

    def _look(self, first: int, part: Tensor) -> None:
        """Take those of a piece, whose first has a number in what is stored."""
        numbers = part.reshape(-1).numpy().astype(np.int64, copy=False)
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
