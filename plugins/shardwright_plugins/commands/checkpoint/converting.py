"""Checkpoints from and to other forms: DCP's own folders, TorchRec's among them, and plain state dicts in one file."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwright.errors import CheckpointError
from shardwright_plugins.checkpoint.entries import MODEL, STATE
from shardwright_plugins.checkpoint.files import StoredFiles, writing
from shardwright_plugins.checkpoint.folder import complete, prepare, saving_folder
from shardwright_plugins.checkpoint.metadata import METADATA, Manifest, reason_of
from shardwright_plugins.checkpoint.reading import StoredCheckpoint
from shardwright_plugins.checkpoint.saving import save_entries
from shardwright_plugins.checkpoint.stored_order import STORED, STORED_ROWS
from shardwright_plugins.checkpoint.writers import Progress, write_manifest
from shardwright_plugins.commands.checkpoint.torchrec import translate

_TOP = ("model", "optimizer", "extra")


def whole_entries(
    stored: StoredCheckpoint, progress: Callable[[str], None] = lambda key: None
) -> Iterator[tuple[str, Any]]:
    """Every entry of a checkpoint, whole and with its rows in order, one after the other.

    Args:
        stored: the checkpoint.
        progress: function called with each name before its entry is read.
    """
    for key, entry in stored.entries.items():
        if key.endswith(f".{STORED_ROWS}"):
            continue
        progress(key)
        if not isinstance(entry, TensorStorageMetadata):
            yield key, stored.plain(key)
            continue
        key = key.removesuffix(f".{STORED}")
        tensor = stored.tensor(key)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        tensor.read(whole, 0)
        yield key, whole


def nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries as ``{"model": state dict, "optimizer": {"state": ..., "param_groups": ...}, "extra": ...}``."""
    made: dict[str, Any] = {}
    for key, value in entries.items():
        top, _, name = key.partition(".")
        own = made.setdefault(top, {})
        if key.startswith(STATE):
            parameter, _, entry = key.removeprefix(STATE).rpartition(".")
            own.setdefault("state", {}).setdefault(parameter, {})[entry] = value
        else:
            own[name] = value
    return made


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of what :func:`nested` gives, or of a module's state dict alone."""
    if not state.keys() <= set(_TOP) or not isinstance(state.get("model"), Mapping):
        return {MODEL + name: value for name, value in state.items()}
    entries = {MODEL + name: value for name, value in state["model"].items()}
    optimizer = state.get("optimizer", {})
    for parameter, values in optimizer.get("state", {}).items():
        entries |= {f"{STATE}{parameter}.{entry}": value for entry, value in values.items()}
    entries |= {f"optimizer.{name}": value for name, value in optimizer.items() if name != "state"}
    return entries | {f"extra.{rank}": value for rank, value in state.get("extra", {}).items()}


def to_file(stored: StoredCheckpoint, path: Path, progress: Callable[[str], None] = lambda key: None) -> None:
    """Write a checkpoint as one file of ``torch.save``; all of it is in memory for that.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the file not be written.
    """
    with writing(path, lambda: path.open("wb")) as file:
        torch.save(nested(dict(whole_entries(stored, progress))), file)


def from_file(path: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write a checkpoint from a file of ``torch.save``, which is read as plain data.

    Args:
        path: the file: a state dict, or a file that :func:`to_file` wrote.
        folder: folder of the checkpoint, named after its step.
        progress: function called with the bytes written so far, and with those of all tensors.

    Raises:
        CheckpointError: the file is something else.
    """
    is_zip = zipfile.is_zipfile(path)  # torch maps no others: those of torch before 1.6
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # whatever bytes can make of torch's reader
        reason = reason_of(error) if is_zip else "it is no file that torch.save wrote"
        raise CheckpointError(f"{path} cannot be read as plain data: {reason}") from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path} has a {type(state).__name__}, not a state dict")
    entries = flat(state)
    inside = [key.removeprefix(MODEL) for key, value in entries.items() if _is_state_dict(key, value)]
    if inside:
        raise CheckpointError(
            f"{path} has state dicts under {', '.join(map(repr, inside))}, which would be lost. What is read is a "
            'module\'s state dict, or {"model": that, "optimizer": ..., "extra": ...}, with or without the last two'
        )
    entries = {
        key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in entries.items()
    }
    save_entries(entries, folder, progress)


def _is_state_dict(key: str, value: Any) -> bool:
    """True for a mapping where a module has a tensor: what is written beside a state dict is taken for its entries."""
    return key.startswith(MODEL) and isinstance(value, Mapping) and not key.endswith("_extra_state")


def adopt(stored: StoredCheckpoint, folder: Path, progress: Progress | None = None) -> None:
    """Make a checkpoint with a manifest of one that DCP alone wrote: its files are copied, names begin with a module.

    States of TorchRec's fused optimizers get the names and shapes of torch's; see :mod:`.torchrec`.

    Args:
        stored: the checkpoint that DCP wrote.
        folder: folder of the new checkpoint, named after its step.
        progress: function called with the bytes copied so far, and with those of all files.

    Raises:
        CheckpointError: its files cannot be read, or the folder not be written.
    """
    try:
        _adopt(stored, folder, progress)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}", subject=str(folder)) from error


def _adopt(stored: StoredCheckpoint, folder: Path, progress: Progress | None) -> None:
    prepare(folder)
    target, source = saving_folder(folder), Path(stored.path)
    names = sorted({place.relative_path for place in stored.metadata.storage_data.values()})
    copied, total = 0, sum((source / name).stat().st_size for name in names)
    for name in names:
        shutil.copyfile(source / name, target / name)
        copied += (target / name).stat().st_size
        if progress is not None:
            progress(copied, total)
    number = int(folder.name.rpartition("_")[2])
    metadata = translate(_under_model(stored.metadata), stored, target, number)
    (target / METADATA).write_bytes(pickle.dumps(metadata))
    stored_files = StoredFiles(FileSystem(), target)
    files = {path.name: stored_files.measured(path.name) for path in sorted(target.iterdir())}
    write_manifest(stored_files, Manifest(number, world_size=1, files=files))
    complete(folder, None)


def _under_model(metadata: Metadata) -> Metadata:
    """The metadata with names that begin as those of our checkpoints do."""
    keys = metadata.state_dict_metadata
    if any(key.startswith(MODEL) for key in keys):
        return metadata
    return dataclasses.replace(
        metadata,
        state_dict_metadata={MODEL + key: entry for key, entry in keys.items()},
        planner_data=None,
        storage_data={
            dataclasses.replace(index, fqn=MODEL + index.fqn): place
            for index, place in metadata.storage_data.items()
        },
    )
