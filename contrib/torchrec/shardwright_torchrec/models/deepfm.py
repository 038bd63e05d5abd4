"""DeepFM: Guo and others 2017, arXiv:1703.04247.

Legend: B batch, F sparse features, D columns of an embedding and of the dense part's output, DI of the deep part's.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright_torchrec.modules.deepfm import DeepFM, FactorizationMachine


class SparseArch(nn.Module):
    """The embeddings of the sparse features.

    Args:
        embedding_bag_collection: the tables.
    """

    def __init__(self, embedding_bag_collection: sw.EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedTensor:
        """The pooled embeddings."""
        pooled: sw.KeyedTensor = self.embedding_bag_collection(features)
        return pooled


class DenseArch(nn.Module):
    """Two layers over the dense features.

    Args:
        in_features: columns of the dense features.
        hidden_layer_size: columns between the layers.
        embedding_dim: ``D``.
    """

    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim),
            nn.ReLU(),
        )

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features]`` -> ``[B, D]``."""
        result: Tensor = self.model(features)
        return result


class FMInteractionArch(nn.Module):
    """A deep part and a factorisation machine over all embeddings of a sample.

    Args:
        fm_in_features: columns of all embeddings, the dense part's output among them.
        sparse_feature_names: the features.
        deep_fm_dimension: ``DI``.
    """

    def __init__(self, fm_in_features: int, sparse_feature_names: list[str], deep_fm_dimension: int) -> None:
        super().__init__()
        self.sparse_feature_names = sparse_feature_names
        self.deep_fm = DeepFM(nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU()))
        self.fm = FactorizationMachine()

    def forward(self, dense_features: Tensor, sparse_features: sw.KeyedTensor) -> Tensor:
        """``[B, D]`` and the pooled embeddings -> ``[B, D + DI + 1]``."""
        if not self.sparse_feature_names:
            return dense_features
        values = [dense_features]
        for name in self.sparse_feature_names:
            values.append(sparse_features[name])
        return torch.cat([dense_features, self.deep_fm(values), self.fm(values)], dim=1)


class OverArch(nn.Module):
    """One layer and a sigmoid: probabilities.

    Args:
        in_features: columns of the input.
    """

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features]`` -> ``[B, 1]``."""
        result: Tensor = self.model(features)
        return result


class SimpleDeepFMNN(nn.Module):
    """DeepFM over embeddings and a dense part.

    Args:
        num_dense_features: columns of the dense features.
        embedding_bag_collection: tables of one width ``D``.
        hidden_layer_size: columns between the dense part's layers.
        deep_fm_dimension: ``DI``.

    Raises:
        InvalidInputError: the tables have several widths.
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: sw.EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        configs = embedding_bag_collection.embedding_bag_configs()
        widths = {config.embedding_dim for config in configs}
        if len(widths) != 1:
            raise sw.InvalidInputError(
                f"SimpleDeepFMNN's tables have one embedding_dim, got {sorted(widths)}"
            )
        (columns,) = widths
        names = [name for config in configs for name in config.feature_names]
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, columns)
        self.inter_arch = FMInteractionArch(columns * (len(names) + 1), names, deep_fm_dimension)
        self.over_arch = OverArch(columns + deep_fm_dimension + 1)

    def forward(self, dense_features: Tensor, sparse_features: sw.KeyedJaggedTensor) -> Tensor:
        """Probabilities ``[B, 1]``."""
        dense = self.dense_arch(dense_features)
        result: Tensor = self.over_arch(self.inter_arch(dense, self.sparse_arch(sparse_features)))
        return result
