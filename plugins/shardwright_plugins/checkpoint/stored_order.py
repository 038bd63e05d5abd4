"""The order in which rows are stored: as the table has them, or part after part with an index of their rows.

A row map whose parts are many short runs of rows would make as many pieces; then each part is stored in one run.

Legend: R rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.planning.layouts.layout import Block
from shardwright.planning.layouts.stored_rows import rows_between
from shardwright.runtime.sharded.tables.blocked_tensor import PIECE_BYTES, BlockedTensor, BlockForm, Piece
from shardwright.runtime.sharded.tables.table_state import TableState
from shardwright.runtime.step.kernel_groups import rows_of_parts

STORED, STORED_ROWS = "stored", "stored_rows"
"""Suffixes of the keys of tables stored in the order of an index: the values, and their row numbers."""


def in_stored_order(state: TableState, name: str, value: BlockedTensor) -> dict[str, BlockedTensor]:
    """A sharded tensor as it is stored: itself, or the rows part after part; :func:`stored_rows` says which.

    Args:
        state: the table that it is of.
        name: name of the tensor in the state dict.
        value: the tensor.
    """
    if not state.is_stored_by_index or not value.dim():
        return {name: value}

    def whole_part(block: Block) -> Iterator[tuple[int, int, int]]:
        yield _first_stored_row(state, block), 0, block.num_rows

    form = BlockForm(lambda values: state.pieces(values, value.shape[1], whole_part), places=state.local)
    stored = [own for _, own in value.blocks]
    return {f"{name}.{STORED}": BlockedTensor(value.shape, value.dtype, value.device, stored, form)}


def stored_rows(state: TableState, name: str) -> dict[str, BlockedTensor]:
    """The index of rows that are stored by one: int64 ``[R, 1]``; nothing for others."""
    if not state.is_stored_by_index:
        return {}
    form = BlockForm(
        lambda values: [piece for local in state.local for piece in _number_pieces(state, local.block)]
    )
    shape = (state.table.num_embeddings, 1)
    return {f"{name}.{STORED_ROWS}": BlockedTensor(shape, torch.int64, form=form)}


def _number_pieces(state: TableState, block: Block) -> Iterator[Piece]:
    first, num_rows = _first_stored_row(state, block), state.sharding.layout.row_map.num_rows
    is_written = state.is_first_owner(block) and block.columns.start == 0
    rows, most = block.rows.rows, PIECE_BYTES // 8
    for start in range(0, block.num_rows, most):
        count = min(most, block.num_rows - start)
        numbers = partial(_row_numbers, rows, start, start + count, num_rows)
        yield Piece((first + start, 0), (count, 1), numbers, is_written)


def _row_numbers(rows: Any, start: int, stop: int, num_rows: int) -> Tensor:
    """Numbers of some of a part's rows, int64 ``[stop - start, 1]``."""
    return torch.from_numpy(rows_between(rows, start, stop, num_rows)).unsqueeze(1)


def _first_stored_row(state: TableState, block: Block) -> int:
    """The stored row of a part's first row where the parts are stored one after the other."""
    return int(rows_of_parts(state.sharding.layout.row_map)[: block.rows.index].sum())
