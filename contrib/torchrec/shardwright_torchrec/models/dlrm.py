"""DLRM: Naumov and others 2019, arXiv:1906.00091; with cross networks, DLRM-DCNv2 of MLPerf.

Legend: B batch, F sparse features, D columns of an embedding and of the dense part's output.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

import math
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

import shardwright as sw
from shardwright_torchrec.modules.crossnet import LowRankCrossNet
from shardwright_torchrec.modules.mlp import MLP


def choose(n: int, k: int) -> int:
    """Number of ways to choose ``k`` of ``n``; 0 outside ``0 <= k <= n``."""
    return math.comb(n, k) if 0 <= k <= n else 0


class SparseArch(nn.Module):
    """The embeddings of the sparse features.

    Args:
        embedding_bag_collection: tables of one width ``D``.
    """

    def __init__(self, embedding_bag_collection: sw.EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        configs = embedding_bag_collection.embedding_bag_configs()
        widths = {config.embedding_dim for config in configs}
        if len(widths) != 1:
            raise sw.InvalidInputError(f"DLRM's tables have one embedding_dim, got {sorted(widths)}")
        (self.D,) = widths
        self._sparse_feature_names = [name for config in configs for name in config.feature_names]
        self.F = len(self._sparse_feature_names)

    def forward(self, features: sw.KeyedJaggedTensor) -> Tensor:
        """The pooled embeddings: ``[B, F, D]``."""
        pooled: Tensor = self.embedding_bag_collection(features).values()
        return pooled.reshape(-1, self.F, self.D)

    @property
    def sparse_feature_names(self) -> list[str]:
        """The features, in the order of the output."""
        return self._sparse_feature_names


class DenseArch(nn.Module):
    """A perceptron over the dense features.

    Args:
        in_features: columns of the dense features.
        layer_sizes: columns of the layers; the last is ``D``.
        device: device of the weights.
    """

    def __init__(self, in_features: int, layer_sizes: list[int], device: torch.device | None = None) -> None:
        super().__init__()
        self.model: nn.Module = MLP(in_features, layer_sizes, bias=True, activation="relu", device=device)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features]`` -> ``[B, D]``."""
        result: Tensor = self.model(features)
        return result


def _side_by_side(dense_features: Tensor, sparse_features: Tensor) -> Tensor:
    """The dense part's output and the embeddings as one: ``[B, 1 + F, D]``."""
    return torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)


def _of_pairs(products: Tensor, pairs: Tensor) -> Tensor:
    """The products of some pairs: ``[B, N, N]`` and ``[2, P]`` -> ``[B, P]``."""
    return products[:, pairs[0], pairs[1]]


torch.fx.wrap("_of_pairs")  # a trace that looked inside would keep the pairs as constants


class InteractionArch(nn.Module):
    """Dot products of all pairs of embeddings, the dense part's output among them.

    Args:
        num_sparse_features: ``F``.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.F = num_sparse_features
        indices = torch.triu_indices(self.F + 1, self.F + 1, offset=1)
        self.register_buffer("triu_indices", indices, persistent=False)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` -> ``[B, D + F + F (F - 1) / 2]``."""
        if self.F <= 0:
            return dense_features
        both = _side_by_side(dense_features, sparse_features)
        products = torch.bmm(both, both.transpose(1, 2))
        return torch.cat([dense_features, _of_pairs(products, self.triu_indices)], dim=1)


class InteractionDCNArch(nn.Module):
    """A cross network over all embeddings of a sample.

    Args:
        num_sparse_features: ``F``.
        crossnet: the network, over ``(1 + F) D`` features.
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F, self.crossnet = num_sparse_features, crossnet

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` -> ``[B, (1 + F) D]``."""
        if self.F <= 0:
            return dense_features
        result: Tensor = self.crossnet(_side_by_side(dense_features, sparse_features).flatten(1))
        return result


class InteractionProjectionArch(nn.Module):
    """Products of two projections of all embeddings of a sample, ``[F1, D]`` and ``[D, F2]``.

    Args:
        num_sparse_features: ``F``.
        interaction_branch1: the first projection; its output has ``F1 D`` columns.
        interaction_branch2: the second; its output has ``D F2`` columns.
    """

    def __init__(
        self, num_sparse_features: int, interaction_branch1: nn.Module, interaction_branch2: nn.Module
    ) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.interaction_branch1, self.interaction_branch2 = interaction_branch1, interaction_branch2

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` -> ``[B, D + F1 F2]``."""
        if self.F <= 0:
            return dense_features
        batch, columns = dense_features.shape
        values = _side_by_side(dense_features, sparse_features).flatten(1)
        first = self.interaction_branch1(values).reshape(batch, -1, columns)
        second = self.interaction_branch2(values).reshape(batch, columns, -1)
        return torch.cat([dense_features, torch.bmm(first, second).flatten(1)], dim=1)


class OverArch(nn.Module):
    """A perceptron over the interactions; its last layer has no activation.

    Args:
        in_features: columns of the interactions.
        layer_sizes: columns of the layers, two at least.
        device: device of the weights.
    """

    def __init__(self, in_features: int, layer_sizes: list[int], device: torch.device | None = None) -> None:
        super().__init__()
        if len(layer_sizes) <= 1:
            raise sw.InvalidInputError(f"over_arch_layer_sizes needs two layers at least, got {layer_sizes}")
        self.model = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], bias=True, activation="relu", device=device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], bias=True, device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features]`` -> ``[B, layer_sizes[-1]]``."""
        result: Tensor = self.model(features)
        return result


class DLRM(nn.Module):
    """DLRM: embeddings and a dense part, their products of pairs, and a perceptron over these.

    Args:
        embedding_bag_collection: tables of one width ``D``.
        dense_in_features: columns of the dense features.
        dense_arch_layer_sizes: columns of the dense part's layers; the last is ``D``.
        over_arch_layer_sizes: columns of the last perceptron's layers; the last is 1 for click rates.
        dense_device: device of the dense weights.

    Raises:
        InvalidInputError: tables have several widths, or the dense part another.
    """

    def __init__(
        self,
        embedding_bag_collection: sw.EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        columns, count = self.sparse_arch.D, self.sparse_arch.F
        if dense_arch_layer_sizes[-1] != columns:
            raise sw.InvalidInputError(
                f"the last of dense_arch_layer_sizes must be the tables' embedding_dim, {columns}; got "
                f"{dense_arch_layer_sizes}"
            )
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        self.inter_arch: nn.Module = InteractionArch(count)
        self.over_arch = OverArch(columns + count + choose(count, 2), over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: sw.KeyedJaggedTensor) -> Tensor:
        """Logits ``[B, over_arch_layer_sizes[-1]]``."""
        dense = self.dense_arch(dense_features)
        result: Tensor = self.over_arch(self.inter_arch(dense, self.sparse_arch(sparse_features)))
        return result


class DLRM_Projection(DLRM):
    """DLRM with products of two projections instead of all pairs.

    Args:
        embedding_bag_collection: tables of one width ``D``.
        dense_in_features: columns of the dense features.
        dense_arch_layer_sizes: columns of the dense part's layers.
        over_arch_layer_sizes: columns of the last perceptron's layers.
        interaction_branch1_layer_sizes: columns of the first projection's layers; the last is a multiple of ``D``.
        interaction_branch2_layer_sizes: columns of the second projection's layers; likewise.
        dense_device: device of the dense weights.
    """

    def __init__(
        self,
        embedding_bag_collection: sw.EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        interaction_branch1_layer_sizes: list[int],
        interaction_branch2_layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )
        branches = (interaction_branch1_layer_sizes, interaction_branch2_layer_sizes)
        count, columns = self.sparse_arch.F, self.sparse_arch.D
        for sizes in branches:
            if sizes[-1] % columns:
                raise sw.InvalidInputError(
                    f"the last of a branch's layer sizes must be a multiple of {columns}, got {sizes}"
                )
        first, second = (DenseArch((count + 1) * columns, sizes, dense_device) for sizes in branches)
        self.inter_arch = InteractionProjectionArch(count, first, second)
        products = (branches[0][-1] // columns) * (branches[1][-1] // columns)
        self.over_arch = OverArch(columns + products, over_arch_layer_sizes, dense_device)


class DLRM_DCN(DLRM):
    """DLRM with a low-rank cross network, MLPerf's DLRM-DCNv2.

    Args:
        embedding_bag_collection: tables of one width ``D``.
        dense_in_features: columns of the dense features.
        dense_arch_layer_sizes: columns of the dense part's layers.
        over_arch_layer_sizes: columns of the last perceptron's layers.
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: its rank.
        dense_device: device of the dense weights.
    """

    def __init__(
        self,
        embedding_bag_collection: sw.EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )
        columns = (self.sparse_arch.F + 1) * self.sparse_arch.D
        crossnet = LowRankCrossNet(columns, dcn_num_layers, dcn_low_rank_dim).to(dense_device)
        self.inter_arch = InteractionDCNArch(self.sparse_arch.F, crossnet)
        self.over_arch = OverArch(columns, over_arch_layer_sizes, dense_device)


class DLRMTrain(nn.Module):
    """A DLRM with its loss, for training loops.

    Args:
        dlrm_module: the model; its logits have one column.
    """

    def __init__(self, dlrm_module: DLRM) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The loss of a `Batch`, and ``(loss, logits, labels)`` detached."""
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
