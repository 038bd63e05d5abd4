"""Workloads drawn by a seed: as many tables, and as unlike, as a small recommender model has."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.planning.arrays import Ints

_TABLES = (14, 22)
_ROWS = (100, 1_000_000)
_COLUMNS = (8, 16, 32, 64, 128)
_IDS = (1, 30)
_BATCHES = (512, 2048)
_OPTIMIZER = {"name": "row_wise_adagrad", "learning_rate": 0.02, "eps": 1e-8}


def drawn_workload(seed: int) -> dict[str, Any]:
    """A workload as JSON data: 14 to 22 pooled tables of 100 to 1 M rows, 8 to 128 columns, 1 to 30 ids a bag.

    Rows and ids are drawn evenly by their logarithms, columns and the batch size from a few common ones.

    Args:
        seed: number that decides everything.
    """
    draw = np.random.default_rng(seed)
    count = int(draw.integers(_TABLES[0], _TABLES[1] + 1))
    rows, ids = (_drawn(draw, *ends, count) for ends in (_ROWS, _IDS))
    columns = draw.choice(_COLUMNS, count)
    tables = [
        {
            "name": f"t{index}",
            "num_embeddings": int(rows[index]),
            "embedding_dim": int(columns[index]),
            "pooling_factor": int(ids[index]),
            "optimizer": _OPTIMIZER,
        }
        for index in range(count)
    ]
    return {"name": f"drawn_{seed}", "batch_size_per_rank": int(draw.choice(_BATCHES)), "tables": tables}


def _drawn(draw: np.random.Generator, least: int, most: int, count: int) -> Ints:
    """Whole numbers whose logarithms are even."""
    numbers: Ints = np.exp(draw.uniform(np.log(least), np.log(most), count)).round().astype(np.int64)
    return numbers
