"""``ShardedEmbeddingBagCollection``: an ``EmbeddingBagCollection`` over many ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from shardwright.modules.embedding_modules import EmbeddingBagCollection
from shardwright.planning.tables.spec import EmbeddingBagConfig
from shardwright.runtime.sharded.collections.sharded_collection import (
    CollectionSharder,
    ShardedCollection,
    ShardingInputs,
)
from shardwright.runtime.step.awaitable import LazyAwaitable, LazyCall
from shardwright.runtime.step.engine import EngineStep
from shardwright.sparse import KeyedTensor


class ShardedEmbeddingBagCollection(ShardedCollection):
    """The sharded form of an :class:`EmbeddingBagCollection`: the same input and output, tables on many ranks.

    It returns the pooled output ``[B, C]`` float32.
    """

    def __init__(self, inputs: ShardingInputs) -> None:
        super().__init__(inputs, tables_name="embedding_bags")
        outputs = self.engine.collection.outputs
        self._names = tuple([output.name for output in outputs])
        self._dims = tuple([output.dim for output in outputs])
        self._index = {name: place for place, name in enumerate(self._names)}

    def output_dist(self, step: EngineStep) -> LazyAwaitable[KeyedTensor]:
        """The results in order, waited for on first use."""
        return LazyCall(partial(self._keyed, step.promise()))

    def _keyed(self, outputs: Callable[[], list[Tensor]]) -> KeyedTensor:
        (values,) = outputs()
        return KeyedTensor._trusted(
            self._names, self._dims, values.to(self.output_dtype), index_per_key=self._index
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configurations."""
        return [config for config in self._configs if isinstance(config, EmbeddingBagConfig)]

    def is_weighted(self) -> bool:
        """True if ids carry weights."""
        return self.inputs.unsharded.is_weighted()


class EmbeddingBagCollectionSharder(CollectionSharder):
    """Shards :class:`EmbeddingBagCollection`; with another ``module_type``, any collection of pooled tables.

    Example:
        >>> import shardwright as sw
        >>> table = sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])
        >>> sharder = sw.EmbeddingBagCollectionSharder({"optimizer": "row_wise_adagrad", "learning_rate": 0.05})
        >>> model = sw.DistributedModelParallel(
        ...     sw.EmbeddingBagCollection([table]), env=sw.ShardingEnv.local(device_type="cpu"), sharders=[sharder]
        ... )
        >>> model(sw.KeyedJaggedTensor.from_lists({"item": [[1, 2], []]})).values().shape
        torch.Size([2, 8])
    """

    module_type: ClassVar[type[nn.Module]] = EmbeddingBagCollection
    sharded_type: ClassVar[type[ShardedCollection]] = ShardedEmbeddingBagCollection
