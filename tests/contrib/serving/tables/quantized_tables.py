"""Collections of three tables to be quantized, and their batches; table ``a`` shares a feature with table ``b``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import shardwright as sw

TABLES = {"a": ["f", "g"], "b": ["f"], "c": ["h"]}


def tables_of(
    pooling: str,
    dims: Sequence[int],
    rows: Sequence[int] = (11, 7, 5),
    *,
    is_weighted: bool = False,
    need_indices: bool = False,
) -> Any:
    """A collection of float tables with the same values each time.

    Args:
        pooling: of the tables; ``"NONE"`` for a collection of sequences.
        dims: columns of the tables.
        rows: rows of the tables.
        is_weighted: True for weights of ids.
        need_indices: True for sequences with their ids.
    """
    torch.manual_seed(3)
    common: list[Any] = [
        {"name": name, "num_embeddings": rows, "embedding_dim": dim, "feature_names": features}
        for (name, features), rows, dim in zip(TABLES.items(), rows, dims, strict=True)
    ]
    if pooling == "NONE":
        return sw.EmbeddingCollection(
            [sw.EmbeddingConfig(**one) for one in common], need_indices=need_indices
        )
    return sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(pooling=pooling, **one) for one in common], is_weighted=is_weighted
    )


def batch(*, is_weighted: bool = False) -> sw.KeyedJaggedTensor:
    """Six bags of each feature of tables with 11, 7 and 5 rows, some of them empty."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 5, (3, 6))
    counts, rows = lengths.sum(1), (7, 11, 5)
    ids = np.concatenate([random.integers(0, most, count) for most, count in zip(rows, counts, strict=True)])
    return sw.KeyedJaggedTensor(
        keys=["f", "g", "h"],
        values=torch.from_numpy(ids),
        lengths=torch.from_numpy(lengths.astype(np.int32).reshape(-1)),
        weights=torch.from_numpy(random.random(len(ids)).astype(np.float32)) if is_weighted else None,
    )


def outputs(found: Any) -> torch.Tensor:
    """The values of a collection's result, of sequences one feature after the other."""
    if isinstance(found, dict):
        return torch.cat([found[name].values().flatten() for name in sorted(found)])
    kept: torch.Tensor = found.values()
    return kept
