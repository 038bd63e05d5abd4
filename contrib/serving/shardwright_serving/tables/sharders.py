"""Sharders of quantized collections: their tables over many ranks, by core's engine."""

from __future__ import annotations

from typing import ClassVar

from attrs import evolve
from torch import nn

import shardwright as sw
from shardwright_serving.tables.collections import QuantEmbeddingBagCollection, QuantEmbeddingCollection


def _served(
    sharder: sw.EmbeddingBagCollectionSharder | sw.EmbeddingCollectionSharder,
    tables: list[sw.TableSpec],
    path: str,
) -> list[sw.TableSpec]:
    """The specifications without optimizers: nothing that goes through the tables is trained.

    Raises:
        UnsupportedError: the sharder was given an optimizer, or a limit of gradients.
    """
    asked = ("max_gradient",) * (sharder.max_gradient is not None)
    asked += ("optimizer",) * (not sharder.optimizer.is_assumed)
    if asked:
        raise sw.UnsupportedError(
            f"the collection at {path!r} is quantized and not trained, and its sharder's fused_params ask for "
            f"{' and '.join(asked)}: leave them out",
            subject=path,
            asked=asked[0],
        )
    return [evolve(table, optimizer=None) for table in tables]


class QuantEmbeddingBagCollectionSharder(sw.EmbeddingBagCollectionSharder):
    """Shards :class:`QuantEmbeddingBagCollection`."""

    module_type: ClassVar[type[nn.Module]] = QuantEmbeddingBagCollection

    def tables(self, module: nn.Module, path: str = "") -> list[sw.TableSpec]:
        """The specifications of the collection's tables: frozen, without optimizers.

        Raises:
            UnsupportedError: the sharder was given an optimizer, or a limit of gradients.
        """
        return _served(self, super().tables(module, path), path)


class QuantEmbeddingCollectionSharder(sw.EmbeddingCollectionSharder):
    """Shards :class:`QuantEmbeddingCollection`."""

    module_type: ClassVar[type[nn.Module]] = QuantEmbeddingCollection

    def tables(self, module: nn.Module, path: str = "") -> list[sw.TableSpec]:
        """The specifications of the collection's tables: frozen, without optimizers.

        Raises:
            UnsupportedError: the sharder was given an optimizer, or a limit of gradients.
        """
        return _served(self, super().tables(module, path), path)
