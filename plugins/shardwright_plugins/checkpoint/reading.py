"""Reading of stored tensors into blocks by DCP's storage readers: a load planner asks for the parts that are wanted.

Pieces are read one after the other, so that one is in memory beside the blocks, and a copy of the part that is wanted.

Legend: R rows of a whole tensor; N rows of a block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader

from shardwright.errors import CheckpointError, nearest
from shardwright_plugins.checkpoint.files import StoredFile, StoredFiles, name_of
from shardwright_plugins.checkpoint.folder import find_checkpoint
from shardwright_plugins.checkpoint.metadata import MANIFEST, METADATA, Manifest, metadata_from, reason_of
from shardwright_plugins.checkpoint.requests import (
    Found,
    Ints,
    PartPlanner,
    PieceRequest,
    box_requests,
    index_of,
    row_requests,
)
from shardwright_plugins.checkpoint.stored_order import STORED

_Answer = TypeVar("_Answer")


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
        return self._run(PartPlanner(plain=[key])).values[key]

    def read(self, requests: Iterable[PieceRequest]) -> None:
        """Read parts of pieces, each piece once, in the order of the files.

        Raises:
            CheckpointError: a file cannot be read, or has something else.
        """
        self._run(PartPlanner(requests))

    def _run(self, planner: PartPlanner) -> PartPlanner:
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
