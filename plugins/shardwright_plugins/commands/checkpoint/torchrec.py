"""Optimizer states of TorchRec's checkpoints, under the names and in the shapes of torch's optimizers.

TorchRec's fused optimizers call the first state ``TABLE.momentum1`` whatever it is, and the others ``TABLE.`` and their
name. They save no number of steps (torchrec/distributed/batched_embedding_kernel.py, 1.8). A state of one number a row
is ``[R]``. Of a table that is cut by columns it is ``[k * R]``: each of the ``k`` shards has its own.

Legend: R rows, D columns of a table.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwright.errors import UnsupportedError
from shardwright_plugins.checkpoint.entries import MODEL, STATE, STEP
from shardwright_plugins.checkpoint.reading import StoredCheckpoint
from shardwright_plugins.checkpoint.requests import box_requests

FILE = "__converted_0.distcp"
"""File of the entries that have another shape than in TorchRec's checkpoint."""

_STATE = re.compile(
    re.escape(STATE) + r"(?P<parameter>(?:.*\.)?(?P<table>[^.]+)\.weight)\.(?P=table)\.(?P<state>[^.]+)"
)
_FIRST, _ALONE, _OF_TWO = "momentum1", "sum", ("exp_avg", "exp_avg_sq")


@frozen
class FusedState:
    """A state of a table's optimizer.

    Args:
        key: its name in TorchRec's checkpoint.
        parameter: name of the table's weight.
        name: name of the state in torch's optimizer.
    """

    key: str
    parameter: str
    name: str

    @property
    def new_key(self) -> str:
        """Its name in a checkpoint of ours."""
        return f"{STATE}{self.parameter}.{self.name}"


def fused_states(keys: Iterable[str]) -> list[FusedState]:
    """The states of fused optimizers among the names of a checkpoint."""
    found = [match for key in keys if (match := _STATE.fullmatch(key))]
    names: dict[str, set[str]] = {}
    for match in found:
        names.setdefault(match["parameter"], set()).add(match["state"])
    first = {parameter: _OF_TWO[0] if _OF_TWO[1] in own else _ALONE for parameter, own in names.items()}
    return [
        FusedState(
            match[0],
            match["parameter"],
            first[match["parameter"]] if match["state"] == _FIRST else match["state"],
        )
        for match in found
    ]


def translate(metadata: Metadata, stored: StoredCheckpoint, folder: Path, step: int) -> Metadata:
    """Metadata with the names and shapes of torch's optimizers; what is shaped otherwise is written into a new file.

    Args:
        metadata: metadata of a copy of the checkpoint.
        stored: the checkpoint that DCP wrote.
        folder: folder of the copy.
        step: number of the training step, which the optimizers have counted too.

    Raises:
        UnsupportedError: a state is cut in a way that is not known.
    """
    states = fused_states(metadata.state_dict_metadata)
    if not states:
        return metadata
    matrices = {state.key: state.new_key for state in states if len(_entry(stored, state.key).size) > 1}
    per_row = [state for state in states if state.key not in matrices]
    dropped = {state.key for state in per_row}
    entries = {
        matrices.get(key, key): entry
        for key, entry in metadata.state_dict_metadata.items()
        if key not in dropped
    }
    places = {
        dataclasses.replace(index, fqn=matrices.get(index.fqn, index.fqn)): place
        for index, place in metadata.storage_data.items()
        if index.fqn not in dropped
    }
    made = _Appended(folder / FILE, entries, places)
    for parameter in dict.fromkeys(state.parameter for state in states):
        made.add(f"{STATE}{parameter}.{STEP}", torch.tensor(float(step)))
    for state in per_row:
        made.add(state.new_key, _per_row(stored, state))
    return dataclasses.replace(metadata, state_dict_metadata=entries, storage_data=places, planner_data=None)


def _entry(stored: StoredCheckpoint, key: str) -> TensorStorageMetadata:
    entry = stored.entries.get(key)
    if not isinstance(entry, TensorStorageMetadata):
        raise UnsupportedError(f"{stored.path} has no tensor {key!r}")
    return entry


def _per_row(stored: StoredCheckpoint, state: FusedState) -> Tensor:
    """A state of one number a row, ``[R, 1]``.

    Shards of columns sum or average the mean of squares of their own columns. The mean over all columns is the mean of
    theirs, weighted by their widths.
    """
    entry, weight = _entry(stored, state.key), _entry(stored, MODEL + state.parameter)
    rows = weight.size[0]
    widths = [rows and chunk.sizes[1] for chunk in sorted(weight.chunks, key=lambda chunk: chunk.offsets[1])]
    values = torch.empty(entry.size, dtype=entry.properties.dtype)
    stored.read(box_requests(state.key, entry, values, (0,)))
    if tuple(entry.size) == (rows,):
        return values.reshape(rows, 1)
    is_cut_by_columns = all(chunk.sizes[0] == rows for chunk in weight.chunks)
    if not is_cut_by_columns or entry.size[0] != rows * len(widths):
        raise UnsupportedError(
            f"{stored.path}: {state.key!r} has the shape {list(entry.size)} for a table of {rows} rows in "
            f"{len(weight.chunks)} shards; one number a row, or one a row and shard of columns, can be converted. Load "
            "without it: strict=False"
        )
    shares = torch.tensor(widths, dtype=values.dtype) / sum(widths)
    return (values.reshape(len(widths), rows) * shares[:, None]).sum(0)[:, None]


@frozen
class _Appended:
    """A file to which tensors are added, with their entries in the metadata."""

    path: Path
    entries: dict[str, Any]
    places: dict[MetadataIndex, Any]

    def add(self, key: str, tensor: Tensor) -> None:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        with self.path.open("ab") as file:
            offset = file.tell()
            file.write(buffer.getbuffer())
        start = torch.Size([0] * tensor.dim())
        self.places[MetadataIndex(key, start)] = _StorageInfo(self.path.name, offset, buffer.tell())
        self.entries[key] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.shape, [ChunkStorageMetadata(start, tensor.shape)]
        )
