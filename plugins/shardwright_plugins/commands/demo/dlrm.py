"""The deep learning recommendation model (Naumov et al. 2019, arXiv:1906.00091), over embedding collections.

Shapes: B examples, D columns of each table, T tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from shardwright import EmbeddingBagCollection, KeyedJaggedTensor

__all__ = ["DLRM", "interact"]


class DLRM(nn.Module):
    """Dense features through an MLP, pooled embeddings, their pairwise products, and an MLP over it all."""

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        num_dense: int,
        *,
        bottom_sizes: Sequence[int],
        top_sizes: Sequence[int],
        device: torch.device | str,
    ) -> None:
        """Build the module.

        Args:
            embeddings: Tables of one width with one feature each.
            num_dense: Number of dense features.
            bottom_sizes: Hidden layers of the MLP over dense features; its output is as wide as the tables.
            top_sizes: Hidden layers of the MLP over the products.
            device: Of the MLPs; `meta` takes no memory.
        """
        super().__init__()
        configs = embeddings.embedding_bag_configs()
        self._embedding_dim = configs[0].embedding_dim
        self._num_tables = len(configs)
        num_vectors = 1 + self._num_tables
        num_products = num_vectors * (num_vectors - 1) // 2
        self.embeddings = embeddings
        self.bottom = nn.Sequential(
            *_layers([num_dense, *bottom_sizes, self._embedding_dim], device), nn.ReLU()
        )
        self.top = nn.Sequential(*_layers([self._embedding_dim + num_products, *top_sizes, 1], device))

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """The logits of a click.

        Args:
            dense: [B, number of dense features].
            features: The ids of each table.

        Returns:
            [B] logits.
        """
        # The lookup is begun first and waited for last: a sharded one talks to other ranks meanwhile.
        pooled = self.embeddings(features)
        bottom = self.bottom(dense)
        vectors = pooled.values().view(len(dense), self._num_tables, self._embedding_dim)
        logits: Tensor = self.top(interact(bottom, vectors)).squeeze(1)
        return logits


def interact(dense: Tensor, embeddings: Tensor) -> Tensor:
    """The dense vector beside the dot products of all pairs of vectors.

    Args:
        dense: [B, D].
        embeddings: [B, T, D].

    Returns:
        [B, D + (T + 1) * T / 2]: the products of (1, 0), (2, 0), (2, 1), ..., where 0 is the dense vector.
    """
    vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
    num_vectors = vectors.size(1)
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=dense.device)
    # One index into the flattened products: two into the square take thrice the time.
    return torch.cat([dense, products.index_select(1, rows * num_vectors + columns)], dim=1)


def _layers(sizes: Sequence[int], device: torch.device | str) -> list[nn.Module]:
    """Linear layers of these sizes with ReLUs between them."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in pairwise(sizes):
        layers += [nn.Linear(num_inputs, num_outputs, device=device), nn.ReLU()]
    return layers[:-1]
