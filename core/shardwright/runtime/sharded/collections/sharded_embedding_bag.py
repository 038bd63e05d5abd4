"""``ShardedEmbeddingBagCollection``: an ``EmbeddingBagCollection`` over many ranks."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from shardwright.modules.embedding_modules import EmbeddingBagCollection
from shardwright.planning.tables.spec import EmbeddingBagConfig
from shardwright.runtime.sharded.collections.sharded_collection import (
    CollectionSharder,
    ShardedCollection,
    ShardingInputs,
)
from shardwright.runtime.sharded.collections.sharded_module import register_sharder
from shardwright.runtime.step.awaitable import LazyAwaitable, LazyCall
from shardwright.runtime.step.engine import EngineStep
from shardwright.sparse import KeyedTensor


class ShardedEmbeddingBagCollection(ShardedCollection):
    """The sharded form of an :class:`EmbeddingBagCollection`: the same input and output, tables on many ranks.

    It returns the pooled output ``[B, C]`` float32.
    """

    def __init__(self, inputs: ShardingInputs) -> None:
        super().__init__(inputs, tables_name="embedding_bags")
        self._dims = [output.dim for output in self.engine.collection.outputs]

    def output_dist(self, step: EngineStep) -> LazyAwaitable[KeyedTensor]:
        """The results in order, waited for on first use."""
        outputs = step.promise()
        return LazyCall(
            lambda: KeyedTensor(self.embedding_names(), self._dims, outputs()[0].to(self.output_dtype))
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configurations."""
        return [config for config in self._configs if isinstance(config, EmbeddingBagConfig)]

    def is_weighted(self) -> bool:
        """True if ids carry weights."""
        return self.inputs.is_weighted


@register_sharder
class EmbeddingBagCollectionSharder(CollectionSharder):
    """Shards :class:`EmbeddingBagCollection`; with another ``module_type``, any collection of pooled tables."""

    module_type: ClassVar[type[nn.Module]] = EmbeddingBagCollection
    sharded_type: ClassVar[type[ShardedCollection]] = ShardedEmbeddingBagCollection
