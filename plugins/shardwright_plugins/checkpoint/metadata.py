"""DCP's metadata and our manifest beside it, read as plain data.

DCP writes its metadata as a pickle. Here an unpickler reads it that knows the dozen classes of which metadata are made,
all of them plain values, and refuses every other name; what it gives is then checked, number by number. The manifest is
JSON: what a checkpoint is of, and a checksum of every file, DCP's metadata and itself included.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

import torch
from attrs import asdict, field, frozen
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwright.errors import CheckpointError
from shardwright_plugins.checkpoint.files import StoredFile

METADATA, MANIFEST = ".metadata", "shardwright.json"
FORMAT, VERSION = "shardwright checkpoint", 1

_CLASSES: Mapping[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    # Where it was written; on no system more than a text.
    **{
        (module, name): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which metadata have no use for"
            ) from None


def metadata_from(data: bytes, where: str) -> Metadata:
    """DCP's metadata from the bytes of their file.

    Args:
        data: the file.
        where: its path, for errors.

    Raises:
        CheckpointError: the bytes are something else, or numbers in them make no sense.
    """
    try:
        read = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever bytes can make of an unpickler
        raise CheckpointError(
            f"{where} is not the metadata of a checkpoint: {type(error).__name__}: {error}"
        ) from error
    _check(isinstance(read, Metadata), where, f"it holds a {type(read).__name__}")
    try:
        _check_metadata(read, where)
    except (AttributeError, TypeError, ValueError) as error:  # values that are missing, or of other forms
        raise CheckpointError(f"{where} is damaged: {error}") from error
    return read


def _check(is_right: bool, where: str, what: str) -> None:
    if not is_right:
        raise CheckpointError(f"{where} is damaged: {what}")


def _check_metadata(read: Metadata, where: str) -> None:
    for key, entry in read.state_dict_metadata.items():
        is_right = isinstance(entry, metadata.BytesStorageMetadata) or _is_whole(entry)
        _check(isinstance(key, str) and is_right, where, f"{key!r} is {entry!r}")
    for index, info in read.storage_data.items():
        name, place = info.relative_path, (info.offset, info.length)
        is_name = isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
        _check(is_name, where, f"{index.fqn!r} is in a file called {name!r}")
        _check(_are_sizes(place), where, f"{index.fqn!r} is at {place!r}")


def _is_whole(entry: TensorStorageMetadata) -> bool:
    """True if the chunks of a tensor are within it, and have as many elements as it has."""
    boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    return (
        isinstance(entry.properties.dtype, torch.dtype)
        and all(map(_are_sizes, (entry.size, *chain.from_iterable(boxes))))
        and all(o + n <= size for box in boxes for o, n, size in zip(*box, entry.size, strict=True))
        and sum(math.prod(sizes) for _, sizes in boxes) == math.prod(entry.size)
    )


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and value >= 0 for value in values)


@frozen
class Manifest:
    """The description of a checkpoint.

    Args:
        step: number of the training step.
        world_size: ranks that wrote it.
        files: every file, by name.
        plan: plan document of the model; never needed to load.
    """

    step: int
    world_size: int
    files: Mapping[str, StoredFile] = field(factory=dict)
    plan: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        """Write as a document with a checksum of itself."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({"sha256": _digest(content), **content}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """The manifest that :meth:`to_json` wrote.

        Raises:
            CheckpointError: it is damaged, or of a later version.
        """
        try:
            content = json.loads(text)
            told = content.pop("sha256")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: {error}") from error
        _check(told == _digest(content), where, "its checksum is another")
        version = content.pop("version", None), content.pop("format", None)
        if version != (VERSION, FORMAT):
            raise CheckpointError(
                f"{where} is of version {version[0]!r}; this shardwright reads version {VERSION}"
            )
        files = {name: StoredFile(**file) for name, file in content.pop("files").items()}
        return cls(files=files, **content)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def reason_of(error: Exception) -> str:
    """The reason that torch's reader of plain data gives, without its advice to read the file by unpickling."""
    _, _, reason = str(error).rpartition("WeightsUnpickler error: ")
    return (reason.splitlines() or [""])[0].partition(". Please")[0]
