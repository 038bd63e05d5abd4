"""Embedding collections that are built with the optimizer of their backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import shardwright as sw
from shardwright_torchrec.optim.fused import InBackwardOptimizer


def _refuse_location(location: Any) -> None:
    if location is not None:
        raise sw.UnsupportedError(
            f"location={location!r}: tables of an unsharded module are where its device says; shard it to place them"
        )


class _Fused(torch.nn.Module):
    """The part of both collections that has to do with the optimizer."""

    def _fuse(self, optimizer_type: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> None:
        self._optimizer_type, self._optimizer_kwargs = optimizer_type, dict(kwargs)
        sw.apply_optimizer_in_backward(optimizer_type, self.parameters(), kwargs)

    def optimizer_type(self) -> type[torch.optim.Optimizer]:
        """Class of the optimizer."""
        return self._optimizer_type

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Arguments of the optimizer."""
        return self._optimizer_kwargs

    def fused_optimizer(self) -> sw.KeyedOptimizer:
        """The optimizers of all tables as one, by the names of the parameters."""
        return InBackwardOptimizer(dict(self.named_parameters()))


class FusedEmbeddingBagCollection(_Fused, sw.EmbeddingBagCollection):
    """An `EmbeddingBagCollection` whose tables are updated in the backward pass; sharders read their optimizer.

    Args:
        tables: configurations.
        optimizer_type: class of the optimizer.
        optimizer_kwargs: its arguments, `{"lr": 0.02}`.
        is_weighted: ids have weights.
        device: device of the tables.
        location: must be `None`.

    Raises:
        UnsupportedError: a location is given.
    """

    def __init__(
        self,
        tables: Sequence[sw.EmbeddingBagConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: Mapping[str, Any],
        is_weighted: bool = False,
        device: torch.device | None = None,
        location: Any = None,
    ) -> None:
        _refuse_location(location)
        super().__init__(tables, is_weighted, device)
        self._fuse(optimizer_type, optimizer_kwargs)


class FusedEmbeddingCollection(_Fused, sw.EmbeddingCollection):
    """An `EmbeddingCollection` whose tables are updated in the backward pass; sharders read their optimizer.

    Args:
        tables: configurations.
        optimizer_type: class of the optimizer.
        optimizer_kwargs: its arguments, `{"lr": 0.02}`.
        device: device of the tables.
        need_indices: give the ids beside the rows.
        location: must be `None`.

    Raises:
        UnsupportedError: a location is given.
    """

    def __init__(
        self,
        tables: Sequence[sw.EmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: Mapping[str, Any],
        device: torch.device | None = None,
        need_indices: bool = False,
        location: Any = None,
    ) -> None:
        _refuse_location(location)
        super().__init__(tables, device, need_indices)
        self._fuse(optimizer_type, optimizer_kwargs)


def fuse_embedding_optimizer(
    model: torch.nn.Module,
    optimizer_type: type[torch.optim.Optimizer],
    optimizer_kwargs: Mapping[str, Any],
    device: torch.device,
    location: Any = None,
) -> torch.nn.Module:
    """The model with fused collections, of the same weights, in the place of its collections.

    Args:
        model: a collection, for which a fused one is given; or a model, which is changed in place.
        optimizer_type: class of the optimizer.
        optimizer_kwargs: its arguments, `{"lr": 0.02}`.
        device: device of the tables.
        location: must be `None`.

    Raises:
        UnsupportedError: a location is given.
    """
    _refuse_location(location)
    if isinstance(model, _Fused):
        return model
    if isinstance(model, sw.EmbeddingBagCollection | sw.EmbeddingCollection):
        return _fused(model, optimizer_type, optimizer_kwargs, device)
    for name, child in model.named_children():
        setattr(model, name, fuse_embedding_optimizer(child, optimizer_type, optimizer_kwargs, device))
    return model


def _fused(
    collection: sw.EmbeddingBagCollection | sw.EmbeddingCollection,
    optimizer_type: type[torch.optim.Optimizer],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> torch.nn.Module:
    """A fused collection of the same tables and weights."""
    made: torch.nn.Module
    if isinstance(collection, sw.EmbeddingBagCollection):
        tables, is_weighted = collection.embedding_bag_configs(), collection.is_weighted()
        made = FusedEmbeddingBagCollection(tables, optimizer_type, kwargs, is_weighted, device)
    else:
        configs, gives_ids = collection.embedding_configs(), collection.need_indices()
        made = FusedEmbeddingCollection(configs, optimizer_type, kwargs, device, gives_ids)
    if not any(weight.is_meta for weight in collection.parameters()):
        made.load_state_dict(collection.state_dict())
    return made
