"""The lookup: ids become rows of another kernel's lookup, which has one more row, of zeros, for ids that have none.

Legend: N ids, R rows, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

import shardwright as sw
from shardwright_hash_embedding.hashing import first_values
from shardwright_hash_embedding.index import NONE, RowIndex
from shardwright_hash_embedding.settings import HashSettings

_STEP = "step"


class HashTableLookup(sw.Lookup):
    """Blocks whose ids are keys.

    Args:
        blocks: their specifications.
        kernel: kernel that keeps the rows.
        device: device of the rows.
    """

    def __init__(
        self, blocks: Sequence[sw.BlockSpec], kernel: sw.ComputeKernel, *, device: torch.device
    ) -> None:
        self.blocks = blocks
        self._rows = kernel.build([_with_one_more(spec) for spec in blocks], device=device)
        self.states_per_row = self._rows.states_per_row
        self._indices = [RowIndex(spec.block.num_rows, HashSettings.of(spec.request)) for spec in blocks]
        self._loaded: list[tuple[Tensor, Tensor] | None] = [None] * len(blocks)
        for block in range(len(blocks)):
            self._rows.weight(block).zero_()
        self._first_state = [
            {name: value[-1].clone() for name, value in self._state(block).items()}
            for block in range(len(blocks))
        ]

    def forward(self, bags: sw.Bags, *, training: bool) -> tuple[Tensor, Any]:
        """Sums; in training rows are born and evicted first."""
        found = self._found(bags, learn=training)
        result, saved = self._rows.forward(found, training=training)
        return result, (bags, saved, self._num_evicted) if training else None

    def anticipate(self, saved: Any) -> None:
        """Prepare the backward pass of the kernel of rows; rows evicted later are prepared anew."""
        self._rows.anticipate(saved[1])

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        """Update; an id whose row was evicted since has none to update."""
        bags, inner, num_evicted = saved
        if num_evicted != self._num_evicted:
            inner = self._rows.prepare(self._found(bags, learn=False))
        gradients = self._rows.backward(inner, gradient)
        for block, index in enumerate(self._indices):
            self._reset(block, np.array([len(index.keys)]))
        return gradients

    def weight(self, block: int) -> Tensor:
        """The rows that ids have or may get."""
        return self._rows.weight(block)[:-1]

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        """Optimizer state of the block's rows."""
        whole = self._rows.optimizer_state(block)
        return {name: value if name == _STEP else value[:-1] for name, value in whole.items()}

    def load_step(self, step: float) -> None:
        """Set the step number of the kernel of rows."""
        self._rows.load_step(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the kernel of rows."""
        self._rows.set_learning_rate(learning_rate)

    def row_state(self, block: int) -> Mapping[str, Tensor]:
        """The id of each row, and its uses."""
        index = self._indices[block]
        values = {"row_keys": index.keys, "row_uses": index.uses, "row_last_use": index.last_use}
        return {name: torch.from_numpy(value).unsqueeze(1) for name, value in values.items()}

    def load_rows(self, block: int, state: Mapping[str, Tensor]) -> Tensor:
        """Take over the ids that belong here, wherever they were."""
        keys, uses, last_use = (
            state[name].reshape(-1).cpu().numpy() for name in ("row_keys", "row_uses", "row_last_use")
        )
        rows, index = self.blocks[block].block.rows, self._indices[block]
        source = torch.from_numpy(index.load(keys, uses, last_use, rows.row_map.part_of(keys) == rows.index))
        self._reset(block, np.arange(len(index.keys) + 1))
        self._loaded[block] = (source, torch.from_numpy(index.keys.copy()))
        return source

    def loaded_rows(self, block: int) -> Tensor | None:
        """Row of the loaded table for each row that has had the same id since."""
        loaded = self._loaded[block]
        if loaded is None:
            return None
        source, keys = loaded
        index = self._indices[block]
        kept = torch.from_numpy((index.keys == keys.numpy()) & (index.uses > 0))
        return source.where(kept, torch.tensor(NONE))

    @property
    def _num_evicted(self) -> int:
        return sum(index.num_evicted for index in self._indices)

    def _state(self, block: int) -> Mapping[str, Tensor]:
        whole = self._rows.optimizer_state(block)
        return {name: value for name, value in whole.items() if name != _STEP}

    def _found(self, bags: sw.Bags, *, learn: bool) -> sw.Bags:
        """The bags with rows for ids."""
        blocks = _block_of_each(bags, self.blocks)
        rows = torch.empty_like(bags.ids)
        for block, index in enumerate(self._indices):
            mine = blocks == block
            ids = bags.ids[mine].numpy()
            if learn:
                found, born = index.see(ids)
                self._begin(block, born)
            else:
                found = index.find(ids)
            rows[mine] = torch.from_numpy(np.where(found == NONE, len(index.keys), found))
        return evolve(bags, ids=rows)

    def _begin(self, block: int, born: Any) -> None:
        """Give rows that were born what they begin with."""
        if not len(born):
            return
        self._reset(block, born)
        spec, weight = self.blocks[block], self._rows.weight(block)
        scale = math.sqrt(1 / spec.table.num_embeddings)  # as tables are initialised by default
        values = first_values(self._indices[block].keys[born], weight.shape[1], scale=scale)
        weight[torch.from_numpy(born)] = torch.from_numpy(values).to(weight.dtype)

    def _reset(self, block: int, rows: Any) -> None:
        """Zero rows, and put their optimizer state back to what it was at first."""
        chosen = torch.from_numpy(rows)
        with torch.no_grad():
            self._rows.weight(block)[chosen] = 0
            for name, value in self._state(block).items():
                value[chosen] = self._first_state[block][name]


def _with_one_more(spec: sw.BlockSpec) -> sw.BlockSpec:
    """The block with a row for ids that have none."""
    rows = sw.RowsRange(spec.block.num_rows + 1)
    return evolve(spec, block=sw.Block(rows[0], spec.block.columns, spec.block.rank))


def _block_of_each(bags: sw.Bags, blocks: Sequence[sw.BlockSpec]) -> Tensor:
    """The block that each id is looked up in: ``[N]``."""
    of_slot = torch.tensor([block for block, spec in enumerate(blocks) for _ in range(spec.num_slots)])
    of_bag = of_slot.repeat(len(bags.counts)).repeat_interleave(torch.tensor(bags.flat_counts))
    return bags.per_id(of_bag)
