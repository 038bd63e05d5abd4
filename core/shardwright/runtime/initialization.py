"""Initial weights that do not depend on the plan: each run of rows has a generator of its own.

So a model has the same weights under any plan and number of ranks, and no rank ever makes a whole table.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.modules.embedding_configs import dtype_of
from shardwright.planning.layouts import Block
from shardwright.planning.tables import EmbeddingConfig

_CHUNK_ELEMENTS = 1 << 20
_MASK = (1 << 63) - 1


def initialize(weights: Tensor, config: EmbeddingConfig, block: Block, *, path: str, seed: int) -> None:
    """Fill a block's weights.

    Args:
        weights: ``[rows, columns]`` of the block, filled in place.
        config: its table; an ``init_fn`` is called once for each run of rows ``[run, embedding_dim]`` (one run
            for tables of up to 2^20 elements).
        block: which rows and columns.
        path: path of the table in the model, so that tables differ.
        seed: the same on all ranks.
    """
    columns = slice(block.columns.start, block.columns.stop)
    for number, start, stop in _chunks(config):
        chosen, here = _rows_within(block.rows.rows, start, stop, config.num_embeddings)
        if len(here):
            values = _chunk(config, stop - start, seed=_mix(seed, path, number))
            weights[here] = values[chosen, columns].to(weights.device, weights.dtype)


def _chunks(config: EmbeddingConfig) -> Iterator[tuple[int, int, int]]:
    """Number, first row and row after the last of each run."""
    size = max(1, _CHUNK_ELEMENTS // config.embedding_dim)
    for number, start in enumerate(range(0, config.num_embeddings, size)):
        yield number, start, min(start + size, config.num_embeddings)


def _rows_within(
    rows: slice | np.ndarray[Any, Any], start: int, stop: int, num_rows: int
) -> tuple[Tensor, Tensor]:
    """The members of ``rows`` in ``[start, stop)``: as rows of the run, and their places in ``rows``."""
    if isinstance(rows, slice):
        return _range_within(range(*rows.indices(num_rows)), start, stop)
    wanted = torch.as_tensor(rows)
    here = ((wanted >= start) & (wanted < stop)).nonzero().squeeze(1)
    return wanted[here] - start, here


def _range_within(rows: range, start: int, stop: int) -> tuple[Tensor, Tensor]:
    first = max(0, -(-(start - rows.start) // rows.step))
    last = max(first, min(len(rows), -(-(stop - rows.start) // rows.step)))
    members = rows[first:last]
    return torch.arange(members.start, members.stop, members.step) - start, torch.arange(first, last)


def _chunk(config: EmbeddingConfig, num_rows: int, *, seed: int) -> Tensor:
    values = torch.empty(num_rows, config.embedding_dim, dtype=dtype_of(config.data_type))
    if config.init_fn is None:
        generator = torch.Generator().manual_seed(seed)
        return values.uniform_(
            config.get_weight_init_min(), config.get_weight_init_max(), generator=generator
        )
    with seeded(seed), torch.no_grad():
        config.init_fn(values)
    return values


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Random numbers from ``seed`` while this lasts; after it all generators are as they were before.

    Not by ``torch.manual_seed``, which seeds those of all accelerators too, and for good: every rank would then drop
    out the same elements.

    Args:
        seed: of the CPU's generator and, if a device is given, of that device's.
        device: where numbers are drawn beside the CPU.
    """
    if device is None or device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    with (
        torch.random.fork_rng(devices=[index], device_type=device.type),
        torch.accelerator.device_index(index),
    ):
        torch.default_generator.manual_seed(seed)
        torch.get_device_module(device).manual_seed(seed)
        yield


def _mix(seed: int, path: str, number: int) -> int:
    """A seed for one run of one table (CRC-32 of the three; any good hash would do)."""
    low = zlib.crc32(f"{seed}/{path}/{number}".encode())
    high = zlib.crc32(f"{number}/{path}/{seed}".encode())
    return (high << 32 | low) & _MASK
