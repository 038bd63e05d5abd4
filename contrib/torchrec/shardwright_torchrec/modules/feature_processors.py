"""Feature processors: learnable weights of positions in a bag."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import shardwright as sw

__all__ = [
    "BaseFeatureProcessor",
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
    "PositionWeightedModuleDict",
]


class BaseFeatureProcessor(nn.Module):
    """A base for processors of several features, `{name: JaggedTensor}` -> the same."""


class FeatureProcessor(nn.Module):
    """A base for processors of one feature, `JaggedTensor` -> `JaggedTensor`."""


class FeatureProcessorsCollection(nn.Module):
    """A base for processors of all features, `KeyedJaggedTensor` -> `KeyedJaggedTensor`."""


def _positions(lengths: Tensor) -> Tensor:
    """Position of each id in its bag: ``[number of ids]``."""
    starts = torch.cumsum(lengths, 0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=lengths.device) - torch.repeat_interleave(
        starts, lengths, output_size=total
    )


class PositionWeightedModule(FeatureProcessor):
    """Gives each id of a bag the learnable weight of its position.

    Args:
        max_feature_length: positions with a weight; longer bags are an error of the lookup in them.
        device: device of the weights.
    """

    def __init__(self, max_feature_length: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.position_weight = nn.Parameter(torch.ones(max_feature_length, device=device))

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        with torch.no_grad():
            self.position_weight.fill_(1.0)

    def forward(self, features: sw.JaggedTensor) -> sw.JaggedTensor:
        """The feature with a weight for each id."""
        return sw.JaggedTensor(
            values=features.values(),
            lengths=features.lengths(),
            weights=self.position_weight[_positions(features.lengths())],
        )


def _weights(max_feature_lengths: Mapping[str, int], device: torch.device | None) -> nn.ParameterDict:
    return nn.ParameterDict(
        {
            name: nn.Parameter(torch.ones(length, device=device))
            for name, length in max_feature_lengths.items()
        }
    )


class PositionWeightedModuleDict(BaseFeatureProcessor):
    """Position weights of several features, each a `JaggedTensor`.

    Args:
        max_feature_lengths: feature -> positions with a weight.
        device: device of the weights.
    """

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        self.position_weights = _weights(max_feature_lengths, device)

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        with torch.no_grad():
            for weight in self.position_weights.values():
                weight.fill_(1.0)

    def forward(self, features: dict[str, sw.JaggedTensor]) -> dict[str, sw.JaggedTensor]:
        """The features, those with position weights with a weight for each id."""
        return {
            name: sw.JaggedTensor(
                values=feature.values(),
                lengths=feature.lengths(),
                weights=self.position_weights[name][_positions(feature.lengths())],
            )
            for name, feature in features.items()
            if name in self.position_weights
        }


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Position weights of a batch; features without get the weight 1.

    Args:
        max_feature_lengths: feature -> positions with a weight.
        device: device of the weights.
    """

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        self.max_feature_lengths = max_feature_lengths
        self.position_weights = _weights(max_feature_lengths, device)

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        with torch.no_grad():
            for weight in self.position_weights.values():
                weight.fill_(1.0)

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedJaggedTensor:
        """The batch with a weight for each id."""
        weights = [self._weights_of(name, feature) for name, feature in features.to_dict().items()]
        return sw.KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=torch.cat(weights) if weights else None,
            lengths=features.lengths(),
        )

    def _weights_of(self, name: str, feature: sw.JaggedTensor) -> Tensor:
        positions = _positions(feature.lengths())
        if name not in self.position_weights:
            return torch.ones(len(positions), device=positions.device)
        weights: Tensor = self.position_weights[name][positions]
        return weights


class _Each(FeatureProcessorsCollection):
    """Processors by feature, over a batch."""

    def __init__(self, processors: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._feature_processors = nn.ModuleDict(processors)

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedJaggedTensor:
        """The batch with the weights that the processors give, 1 for features without."""
        found = {
            name: self._feature_processors[name](feature) if name in self._feature_processors else feature
            for name, feature in features.to_dict().items()
        }
        weights = [
            torch.ones(len(feature.values())) if feature.weights_or_none() is None else feature.weights()
            for feature in found.values()
        ]
        return sw.KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=torch.cat(weights),
            lengths=features.lengths(),
        )


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """A weighted collection whose ids' weights come from feature processors.

    The collection inside is sharded; the processors are replicated, and their gradients averaged.

    Args:
        embedding_bag_collection: the collection; weighted.
        feature_processors: processors by feature, or one of a whole batch.

    Raises:
        InvalidInputError: the collection takes no weights.
    """

    def __init__(
        self,
        embedding_bag_collection: sw.EmbeddingBagCollection,
        feature_processors: dict[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise sw.InvalidInputError(
                "feature processors give ids weights: build EmbeddingBagCollection(..., is_weighted=True)"
            )
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors = (
            _Each(feature_processors) if isinstance(feature_processors, dict) else feature_processors
        )

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedTensor:
        """The pooled output of the processed batch."""
        pooled: sw.KeyedTensor = self._embedding_bag_collection(self._feature_processors(features))
        return pooled
