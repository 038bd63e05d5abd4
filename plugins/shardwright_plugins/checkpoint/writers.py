"""DCP's save planner and storage writers, with progress, checksums of files and a manifest."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attrs import evolve
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from shardwright.errors import CheckpointError
from shardwright_plugins.checkpoint.files import StoredFile, StoredFiles, name_of, writing
from shardwright_plugins.checkpoint.folder import (
    complete,
    discard,
    prepare,
    saving_folder,
)
from shardwright_plugins.checkpoint.metadata import MANIFEST, METADATA, Manifest

Progress: TypeAlias = Callable[[int, int], None]
"""Function called with the bytes of tensors that this rank has written or begun, and with all that it will write."""


class ProgressPlanner(DefaultSavePlanner):
    """DCP's save planner, which reports how much of this rank's tensors is written.

    Args:
        progress: function called with the bytes written so far, and with all.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__(flatten_state_dict=False)
        self._progress, self._done, self._total = progress, 0, 0

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Count the bytes that this rank will write."""
        self._total = sum(map(_bytes_of, new_plan.items))
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Report a piece before it is written."""
        count = _bytes_of(write_item)
        self._done += count
        if self._progress is not None and count:
            self._progress(self._done, self._total)
        return super().resolve_data(write_item)


class CheckedWriter:
    """A storage writer of DCP, with checksums of its files and a manifest beside them.

    Args:
        storage: the writer. If it has no files, there is no manifest either.
        manifest: description of the checkpoint.
    """

    def __init__(self, storage: StorageWriter, manifest: Manifest) -> None:
        self._storage, self._manifest = storage, manifest
        self.place, self._files = name_of(storage), StoredFiles.of(storage)
        self.checkpoint: Any = self.place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's part, and tell rank 0 the checksums of its files as one result more."""
        with self._checked() as files, _without_checksums_of_torch():
            written = self._storage.write_data(plan, planner)
            written.wait()
        results: Any = torch.futures.Future()
        results.set_result([*written.value(), WriteResult(_FILES, 0, files)])
        return results

    @contextmanager
    def _checked(self) -> Iterator[dict[str, StoredFile]]:
        """A context in which files have checksums and errors their names; gives the checksums by name."""
        if self._files is None:
            yield {}
            return
        storage: Any = self._storage
        storage.fs = _CheckedFiles(self._files.fs)
        try:
            yield storage.fs.written
        finally:
            storage.fs = self._files.fs

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest; on rank 0, after all files were written."""
        files: dict[str, StoredFile] = {}
        for own in results:
            files |= own.pop().storage_data
        if self._files is None:
            self._storage.finish(metadata, results)
            return
        _check_files(self._files, files)
        with self._checked():
            self._storage.finish(metadata, results)
        files[METADATA] = self._files.measured(METADATA)
        write_manifest(self._files, evolve(self._manifest, files=files))

    def abandon(self) -> None:
        """Remove what was written of a checkpoint that failed, where that is known."""


_FILES = MetadataIndex("files of shardwright")


class FolderWriter(CheckedWriter):
    """A writer into a folder that gets its name at the end.

    Args:
        folder: folder of the step.
        manifest: description of the checkpoint.
        keep: number of checkpoints that stay.
    """

    def __init__(self, folder: Path, manifest: Manifest, keep: int | None) -> None:
        super().__init__(FileSystemWriter(saving_folder(folder)), manifest)
        self.place, self.checkpoint = str(folder), folder
        self._folder, self._keep, self._is_prepared = folder, keep, False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder, on rank 0."""
        self._storage.set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            prepare(self._folder)
            self._is_prepared = True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is: rank 0 makes the folder."""
        return plan

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest, and give the folder its name; on rank 0, after all files were written."""
        super().finish(metadata, results)
        complete(self._folder, self._keep)

    def abandon(self) -> None:
        """Remove the folder that was begun."""
        if self._is_prepared:
            discard(self._folder)


def _bytes_of(item: WriteItem) -> int:
    """Bytes of the piece of a tensor that is to be written; none of plain data."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


@contextmanager
def _without_checksums_of_torch() -> Iterator[None]:
    """Have ``torch.save`` compute none: ours take a quarter of the time, and torch's readers do not look at its own."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _check_files(stored: StoredFiles, files: Mapping[str, StoredFile]) -> None:
    """Check that rank 0 sees what the others wrote.

    Raises:
        CheckpointError: a file is missing, or another.
    """
    for name, file in files.items():
        if not stored.exists(name) or stored.length(name) != file.bytes:
            raise CheckpointError(
                f"rank 0 does not see the file {stored.path(name)} that another rank wrote: all ranks must share the "
                "folder of checkpoints"
            )


def write_manifest(files: StoredFiles, manifest: Manifest) -> None:
    """Write a checkpoint's manifest, and have it on the disk."""
    with writing(files.path(MANIFEST), lambda: files.open(MANIFEST, "wb")) as file:
        file.write(manifest.to_json().encode())
        file.flush()
        with suppress(io.UnsupportedOperation):  # of what is no disk
            os.fsync(file.fileno())


class _CheckedFiles:
    """A file system of DCP, in which each file is written once, from its beginning, and has a checksum then.

    Attributes:
        written: length and checksum of each file that was written.
    """

    def __init__(self, fs: FileSystemBase) -> None:
        self._fs = fs
        self.written: dict[str, StoredFile] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        """Open a file."""
        with writing(path, lambda: self._fs.create_stream(path, mode)) as stream:
            yield stream
        self.written[Path(path).name] = stream.stored
