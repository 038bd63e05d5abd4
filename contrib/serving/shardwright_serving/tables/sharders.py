"""Sharders of quantised collections: their tables over many ranks, by core's engine.

Importing this makes them known to `DistributedModelParallel` and to planners.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import evolve
from torch import nn

import shardwright as sw
from shardwright_serving.tables.collections import QuantEmbeddingBagCollection, QuantEmbeddingCollection

__all__ = ["QuantEmbeddingBagCollectionSharder", "QuantEmbeddingCollectionSharder"]


def _served(tables: list[sw.TableSpec]) -> list[sw.TableSpec]:
    """The specifications without optimizers: nothing that goes through the tables is trained."""
    return [evolve(table, optimizer=None) for table in tables]


@sw.register_sharder
class QuantEmbeddingBagCollectionSharder(sw.EmbeddingBagCollectionSharder):
    """Shards :class:`QuantEmbeddingBagCollection`."""

    module_type: ClassVar[type[nn.Module]] = QuantEmbeddingBagCollection

    def tables(self, module: nn.Module, path: str = "") -> list[sw.TableSpec]:
        """The specifications of the collection's tables: frozen, without optimizers."""
        return _served(super().tables(module, path))


@sw.register_sharder
class QuantEmbeddingCollectionSharder(sw.EmbeddingCollectionSharder):
    """Shards :class:`QuantEmbeddingCollection`."""

    module_type: ClassVar[type[nn.Module]] = QuantEmbeddingCollection

    def tables(self, module: nn.Module, path: str = "") -> list[sw.TableSpec]:
        """The specifications of the collection's tables: frozen, without optimizers."""
        return _served(super().tables(module, path))
