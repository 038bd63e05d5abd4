"""Tables and dense weights of a model that stand in a checkpoint, read block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from attrs import define
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwright.errors import CheckpointError, UnsupportedError, nearest
from shardwright.runtime.checkpoint.entries import MODEL, stored_rows
from shardwright.runtime.checkpoint.folder import find_checkpoint
from shardwright.runtime.checkpoint.reading import StoredCheckpoint, box_requests, row_requests
from shardwright.runtime.sharded.tables.table_state import STORED
from shardwright.serving.rows_file import TableRows
from shardwright.serving.served import KEYED

__all__ = ["StoredTables"]


@define(eq=False, init=False)
class StoredTables:
    """The weights of a model in a checkpoint, whatever plan and ranks saved them.

    Args:
        path: a checkpoint, or a folder of them, of which the newest is taken.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """

    _stored: StoredCheckpoint

    def __init__(self, path: Path) -> None:
        self._stored = StoredCheckpoint(find_checkpoint(path))
        self._stored.verify(self._stored.files)

    def blocks(self, table: TableRows, name: str) -> Iterator[Tensor]:
        """The rows of a table in order, some at a time, in the same memory.

        Args:
            table: the table.
            name: name of its weights in the unsharded model.

        Raises:
            CheckpointError: the checkpoint has no such table, or one of another shape.
            UnsupportedError: its rows are found by keys.
        """
        self._check_rows(name)
        entry, reading = self._reading(MODEL + name)
        wanted = (table.num_embeddings, table.embedding_dim)
        if tuple(entry.size) != wanted:
            raise CheckpointError(
                f"{self._stored.path} has {name!r} of shape {list(entry.size)}; the model's is {list(wanted)}"
            )
        block = torch.empty(min(table.rows_at_once, wanted[0]), wanted[1], dtype=entry.properties.dtype)
        for start in range(0, wanted[0], len(block)):
            some = block[: wanted[0] - start]
            reading(some, start)
            yield some

    def _check_rows(self, name: str) -> None:
        key = MODEL + name
        # Kernels that find rows by keys store what they know of each row beside the weights.
        if any(
            other.startswith(key.removesuffix("weight")) for other in self._stored.entries if key not in other
        ):
            raise UnsupportedError(f"{self._stored.path} has {name!r}: {KEYED}")

    def _reading(self, key: str) -> tuple[TensorStorageMetadata, Callable[[Tensor, int], None]]:
        """An entry, and a function that reads a block of its rows, by the number of the first."""
        by_index = f"{key}.{STORED}"
        if by_index in self._stored.entries:
            entry = self._tensor(by_index)
            places = stored_rows(self._stored, key)

            def read(block: Tensor, start: int) -> None:
                rows = places[start : start + len(block)]
                self._stored.read(row_requests(by_index, entry, block, rows, 0))

            return entry, read
        entry = self._tensor(key)
        return entry, lambda block, start: self._stored.read(box_requests(key, entry, block, (start, 0)))

    def _tensor(self, key: str) -> TensorStorageMetadata:
        entry = self._stored.entries.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            names = [name.removeprefix(MODEL) for name in self._stored.entries if name.startswith(MODEL)]
            name = key.removeprefix(MODEL)
            raise CheckpointError(
                f"{self._stored.path} has no weights {name!r} of the model.{nearest(name, names)}"
            )
        return entry

    def load_dense(self, model: nn.Module) -> nn.Module:
        """Load what is left of a model, without tables; what is on ``meta`` gets memory on the CPU.

        Args:
            model: the model, changed in place.

        Returns:
            The model.

        Raises:
            CheckpointError: the checkpoint lacks a weight, or has one of another shape.
        """
        state = {}
        for name, value in model.state_dict().items():
            entry = self._tensor(MODEL + name)
            if entry.size != value.shape:
                raise CheckpointError(
                    f"{self._stored.path} has {name!r} of shape {list(entry.size)}; the model's is {list(value.shape)}"
                )
            state[name] = torch.empty(entry.size, dtype=value.dtype)
            self._stored.read(box_requests(MODEL + name, entry, state[name], (0,) * value.dim()))
        model.load_state_dict(state, assign=True)
        return model.requires_grad_(False)
