"""Feature processors: learnable weights of positions in a bag.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.fx
from torch import Tensor, nn

import shardwright as sw


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


def _taken(of_position: Tensor, positions: Tensor) -> Tensor:
    """Weight of each id by its position, or the error of a bag that is too long."""
    try:
        return of_position[positions]
    except IndexError:
        raise sw.InvalidInputError(
            f"the longest bag has {int(positions.max()) + 1} ids, and {len(of_position)} positions have a weight "
            "(max_feature_length): shorten the bags, or give more positions"
        ) from None


def _at_positions(of_position: Tensor, lengths: Tensor) -> Tensor:
    """Weight of each id by its position: ``[number of ids]``."""
    positions = _positions(lengths)
    if torch.jit.is_scripting():
        return of_position[positions]
    else:  # TorchScript has no exceptions to catch
        return _taken(of_position, positions)


def _weights_of(feature: sw.JaggedTensor, of_position: Tensor | None) -> Tensor:
    """Weight of each id by its position, 1 without weights of positions: ``[number of ids]``."""
    if of_position is None:
        positions = _positions(feature.lengths())
        return torch.ones(len(positions), device=positions.device)
    return _at_positions(of_position, feature.lengths())


def _weighted(features: sw.KeyedJaggedTensor, weights: dict[str, Tensor]) -> sw.KeyedJaggedTensor:
    """A batch with the weights of its ids, by feature; features that are not there get the weight 1."""
    found: list[Tensor] = []
    for name, feature in features.to_dict().items():
        found.append(weights[name] if name in weights else _weights_of(feature, None))
    joined = torch.cat(found) if len(found) > 0 else None
    if torch.jit.is_scripting():
        return sw.KeyedJaggedTensor(features.keys(), features.values(), joined, features.lengths())
    else:  # TorchScript would compile what stands below the condition
        return sw.KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=joined,
            lengths=features.lengths(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() or None,
            inverse_indices=features.inverse_indices_or_none(),
        )


def _position_weighted(
    features: sw.KeyedJaggedTensor, of_position: dict[str, Tensor]
) -> sw.KeyedJaggedTensor:
    """A batch with weights by position; of features without the weight is 1."""
    bags = features.to_dict()
    weights: dict[str, Tensor] = {}
    for name, own in of_position.items():
        if name in bags:
            weights[name] = _weights_of(bags[name], own)
    return _weighted(features, weights)


def _feature(features: sw.KeyedJaggedTensor, name: str) -> sw.JaggedTensor:
    """The bags of a feature."""
    return features[name]


# Traces of torch.fx take these as they are: they read lengths, and go through the features of a batch.
for _name in ("_at_positions", "_positions", "_weighted", "_position_weighted", "_feature"):
    torch.fx.wrap(_name)


class PositionWeightedModule(FeatureProcessor):
    """Gives each id of a bag the learnable weight of its position.

    Args:
        max_feature_length: positions with a weight; a longer bag is an error.
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
            weights=_at_positions(self.position_weight, features.lengths()),
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
                weights=_at_positions(self.position_weights[name], feature.lengths()),
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

    __jit_unused_properties__: ClassVar[list[str]] = ["position_weights_dict"]
    _scripted_weights: dict[str, Tensor]

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        self.max_feature_lengths = max_feature_lengths
        self.position_weights = _weights(max_feature_lengths, device)
        self._scripted_weights = {}

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        with torch.no_grad():
            for weight in self.position_weights.values():
                weight.fill_(1.0)

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedJaggedTensor:
        """The batch with a weight for each id."""
        if torch.jit.is_scripting():
            return _position_weighted(features, self._scripted_weights)
        else:  # TorchScript would compile what stands below the condition
            return _position_weighted(features, self.position_weights_dict)

    def __prepare_scriptable__(self) -> nn.Module:
        """Itself, as it is, with the weights as TorchScript reads them: it has no mappings of parameters."""
        self._scripted_weights = self.position_weights_dict
        return self

    @property
    def position_weights_dict(self) -> dict[str, Tensor]:
        """The weights by feature, as a plain mapping."""
        return dict(self.position_weights.items())


def _processed(features: sw.KeyedJaggedTensor, processors: nn.Module) -> sw.KeyedJaggedTensor:
    """The batch with the weights that processors give: one of a whole batch, or of features, 1 for those without."""
    if not isinstance(processors, nn.ModuleDict):
        processed: sw.KeyedJaggedTensor = processors(features)
        return processed
    weights = {name: process(_feature(features, name)).weights() for name, process in processors.items()}
    return _weighted(features, weights)


class _ByFeature(FeatureProcessorsCollection):
    """Processors by feature as one of a whole batch; their parameters keep the names that they have."""

    def __init__(self, processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = processors

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedJaggedTensor:
        """The batch with the weights that the processors give."""
        return _processed(features, self._feature_processors)


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """A weighted collection whose ids' weights come from feature processors.

    The collection inside is sharded; the processors are replicated, and work on a batch before its ids travel.
    Gradients of the weights that they give come back, and are averaged over the ranks with those of dense parameters.

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
            nn.ModuleDict(feature_processors) if isinstance(feature_processors, dict) else feature_processors
        )

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedTensor:
        """The pooled output of the processed batch."""
        pooled: sw.KeyedTensor = self._embedding_bag_collection(
            _processed(features, self._feature_processors)
        )
        return pooled

    def split(self) -> tuple[FeatureProcessorsCollection, sw.EmbeddingBagCollection]:
        """The processors as one module of a batch, and the collection: the one's output is the other's input."""
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            processors = _ByFeature(processors)
        return processors, self._embedding_bag_collection
