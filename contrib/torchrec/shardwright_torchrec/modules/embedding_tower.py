"""Towers: an embedding collection and what interacts with its output, as one module.

Legend: B batch.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import shardwright as sw

__all__ = ["EmbeddingTower", "EmbeddingTowerCollection"]


class EmbeddingTower(torch.nn.Module):
    """An embedding collection, and a module of its output.

    Args:
        embedding_module: the collection; sharders shard it where it is.
        interaction_module: module of the embeddings.
        device: not needed.
    """

    def __init__(
        self,
        embedding_module: torch.nn.Module,
        interaction_module: torch.nn.Module,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embedding, self.interaction = embedding_module, interaction_module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Output of the interaction."""
        return self.interaction(self.embedding(*args, **kwargs))


class EmbeddingTowerCollection(torch.nn.Module):
    """Several towers, each of which gets its own features.

    Args:
        towers: the towers; each has one collection.
        device: not needed.
    """

    def __init__(self, towers: Sequence[EmbeddingTower], device: torch.device | None = None) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleList(towers)
        self._inputs = [_input_of(tower.embedding) for tower in towers]

    def forward(
        self,
        features: sw.KeyedJaggedTensor | None = None,
        weighted_features: sw.KeyedJaggedTensor | None = None,
    ) -> Tensor:
        """Outputs of all towers side by side, ``[B, columns]``.

        Args:
            features: features without weights.
            weighted_features: features of the towers whose ids have weights.

        Raises:
            InvalidInputError: features of a tower are missing.
        """
        outputs = []
        for tower, (names, is_weighted) in zip(self.towers, self._inputs, strict=True):
            given = weighted_features if is_weighted else features
            if given is None or (missing := set(names) - set(given.keys())):
                argument = "weighted_features" if is_weighted else "features"
                lacking = names if given is None else sorted(missing)
                raise sw.InvalidInputError(f"a tower needs {lacking} in {argument}")
            outputs.append(tower(given.permute([given.keys().index(name) for name in names])))
        return torch.cat(outputs, dim=1)


def _input_of(embedding: torch.nn.Module) -> tuple[list[str], bool]:
    """Features of the one collection in a tower, and if they have weights."""
    kinds = (sw.EmbeddingBagCollection, sw.EmbeddingCollection)
    found = [module for module in embedding.modules() if isinstance(module, kinds)]
    if len(found) != 1:
        raise sw.InvalidInputError(f"a tower has one embedding collection, found {len(found)}")
    (collection,) = found
    is_bags = isinstance(collection, sw.EmbeddingBagCollection)
    configs = collection.embedding_bag_configs() if is_bags else collection.embedding_configs()
    names = dict.fromkeys(name for config in configs for name in config.feature_names)
    return list(names), is_bags and collection.is_weighted()
