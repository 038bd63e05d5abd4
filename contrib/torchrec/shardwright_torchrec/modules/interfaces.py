"""Interfaces of collections, and small functions of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import shardwright as sw


class EmbeddingBagCollectionInterface(ABC):
    """A collection of bags: `isinstance` is true of unsharded and sharded ones."""

    @abstractmethod
    def forward(self, features: sw.KeyedJaggedTensor) -> Any:
        """Pooled embeddings."""

    @abstractmethod
    def embedding_bag_configs(self) -> Sequence[Any]:
        """Configurations of the tables."""

    @abstractmethod
    def is_weighted(self) -> bool:
        """True if ids have weights."""


class EmbeddingCollectionInterface(ABC):
    """A collection of rows: `isinstance` is true of unsharded and sharded ones."""

    @abstractmethod
    def forward(self, features: sw.KeyedJaggedTensor) -> Any:
        """Rows by feature."""

    @abstractmethod
    def embedding_configs(self) -> Sequence[Any]:
        """Configurations of the tables."""


for _kind in (sw.EmbeddingBagCollection, sw.ShardedEmbeddingBagCollection):
    EmbeddingBagCollectionInterface.register(_kind)
for _other in (sw.EmbeddingCollection, sw.ShardedEmbeddingCollection):
    EmbeddingCollectionInterface.register(_other)


def get_embedding_names_by_table(tables: Sequence[Any]) -> list[list[str]]:
    """Names of each table's outputs: features, with the table's name where several tables share them."""
    users: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            users[feature] = users.get(feature, 0) + 1
    return [
        [f"{feature}@{table.name}" if users[feature] > 1 else feature for feature in table.feature_names]
        for table in tables
    ]


def reorder_inverse_indices(
    inverse_indices: tuple[list[str], Tensor] | None, feature_names: Sequence[str]
) -> Tensor:
    """Inverse indices in the order of other features; an empty tensor without any.

    Args:
        inverse_indices: features, and their indices ``[features, B]``.
        feature_names: features in the order that is wanted.
    """
    if inverse_indices is None:
        return torch.empty(0)
    names, values = inverse_indices
    return values[[names.index(name) for name in feature_names]]
