"""A model of all that packages have: weighted bags, means, sequences, every precision, and a dense input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw

PER_TABLE = {"four": "INT4", "sixteen": "FP16", "eight": "FP8", "two": "INT2"}
KEYS = ["f", "g", "h"]
ROWS = {"f": 30, "g": 40, "h": 20}
"""Feature -> rows of its smallest table."""


def bag(name: str, rows: int, columns: int, features: list[str], **others: Any) -> sw.EmbeddingBagConfig:
    return sw.EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=columns, feature_names=features, **others
    )


class Model(nn.Module):
    """Two outputs, of pooled tables, of means of a sequence, and of a dense input."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            bag("whole", 50, 16, ["f", "g"]),
            bag("four", 40, 9, ["g"], pooling="MEAN"),
            bag("sixteen", 30, 8, ["h"], data_type="FP16"),
            bag("eight", 30, 8, ["h"]),
            bag("two", 30, 10, ["f"]),
        ]
        self.bags = sw.EmbeddingBagCollection(tables, is_weighted=True, device=device)
        rows = sw.EmbeddingConfig(name="rows", num_embeddings=20, embedding_dim=4, feature_names=["h"])
        self.rows = sw.EmbeddingCollection([rows], device=device)
        self.over = nn.Sequential(nn.Linear(74, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)

    def forward(self, dense: Tensor, features: sw.KeyedJaggedTensor) -> dict[str, Tensor]:
        rows = self.rows(features)["h"]
        size = features.stride()
        samples = torch.repeat_interleave(
            torch.arange(size), rows.lengths(), output_size=rows.values().shape[0]
        )
        summed = torch.zeros(size, 4).index_add(0, samples, rows.values())
        logits = self.over(torch.cat([dense, self.bags(features).values(), summed], dim=1))
        return {"click": logits[:, 0].sigmoid(), "buy": logits[:, 1:]}


def batch(lengths: list[list[int]], seed: int = 0) -> tuple[Tensor, sw.KeyedJaggedTensor]:
    """Drawn ids, weights and dense values of bags of some lengths, ``[features][samples]``."""
    random = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(0, ROWS[key], (sum(own),), generator=random)
        for key, own in zip(KEYS, lengths, strict=True)
    ]
    values = torch.cat(ids)
    weights = torch.rand(len(values), generator=random)
    features = sw.KeyedJaggedTensor(KEYS, values, weights, lengths=torch.tensor(lengths).flatten())
    return torch.randn(len(lengths[0]), 3, generator=random), features


EXAMPLE = [[2, 0, 1], [1, 2, 0], [0, 0, 3]]
BATCHES = [EXAMPLE, [[1], [0], [2]], [[0, 0], [0, 0], [0, 0]], [[3, 1, 0, 2], [0, 0, 0, 0], [1, 1, 4, 0]]]
"""Lengths of batches: the example's, one sample, no ids at all, and one feature missing."""
