"""Tables and dense weights of a model that stand in a checkpoint, read block by block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from attrs import define
from torch import Tensor, nn

import shardwright as sw
from shardwright_serving.packages.rows_file import TableRows
from shardwright_serving.packages.served import KEYED

_MODEL = "model."


@define(eq=False, init=False)
class StoredTables:
    """The weights of a model in a checkpoint, whatever plan and ranks saved them.

    Args:
        path: a checkpoint, or a folder of them, of which the newest is taken.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """

    _stored: sw.StoredCheckpoint

    def __init__(self, path: Path) -> None:
        self._stored = sw.open_checkpoint(path)
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
        wanted = (table.num_embeddings, table.embedding_dim)
        stored = self._tensor(name, wanted)
        block = torch.empty(min(table.rows_at_once, wanted[0]), wanted[1], dtype=stored.dtype)
        for start in range(0, wanted[0], len(block)):
            some = block[: wanted[0] - start]
            stored.read(some, start)
            yield some

    def _check_rows(self, name: str) -> None:
        key = _MODEL + name
        # Kernels that find rows by keys store what they know of each row beside the weights.
        if any(
            other.startswith(key.removesuffix("weight")) for other in self._stored.entries if key not in other
        ):
            raise sw.UnsupportedError(f"{self._stored.path} has {name!r}: {KEYED}")

    def _tensor(self, name: str, shape: tuple[int, ...]) -> sw.StoredTensor:
        stored = self._stored.tensor(_MODEL + name)
        if stored.shape != shape:
            raise sw.CheckpointError(
                f"{self._stored.path} has {name!r} of shape {list(stored.shape)}; the model's is {list(shape)}"
            )
        return stored

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
            stored = self._tensor(name, tuple(value.shape))
            state[name] = torch.empty(stored.shape, dtype=value.dtype)
            stored.read(state[name], 0)
        model.load_state_dict(state, assign=True)
        return model.requires_grad_(False)
