"""``ShardedEmbeddingCollection``: an ``EmbeddingCollection`` over many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from shardwright.modules.embedding_modules import EmbeddingCollection
from shardwright.planning.tables.spec import EmbeddingConfig
from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.sharded.collections.sharded_collection import (
    CollectionSharder,
    ShardedCollection,
    ShardingInputs,
)
from shardwright.runtime.step.awaitable import LazyAwaitable, LazyCall
from shardwright.runtime.step.engine import EngineStep
from shardwright.sparse import JaggedTensor


class ShardedEmbeddingCollection(ShardedCollection):
    """The sharded form of an :class:`EmbeddingCollection`: one vector for each id, in the order of the ids.

    It returns for each output name the rows ``[ids, D]`` float32 with the input's lengths.
    """

    def __init__(self, inputs: ShardingInputs) -> None:
        super().__init__(inputs, tables_name="embeddings")
        unsharded: Any = inputs.unsharded
        self.need_indices = bool(unsharded.need_indices())

    def output_dist(self, step: EngineStep) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """The results, waited for on first use."""
        outputs = step.promise()
        return LazyCall(lambda: self._jagged(step, outputs()))

    def _jagged(self, step: EngineStep, values: Sequence[Tensor]) -> dict[str, JaggedTensor]:
        return {
            output.name: JaggedTensor(
                values=rows.to(self.output_dtype),
                lengths=sent_to(rows.device, step.batch.lengths_of(output.feature)),
                weights=sent_to(rows.device, step.batch.ids[output.feature]) if self.need_indices else None,
            )
            for output, rows in zip(self.engine.collection.outputs, values, strict=True)
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configurations."""
        return list(self._configs)


class EmbeddingCollectionSharder(CollectionSharder):
    """Shards :class:`EmbeddingCollection`; with another ``module_type``, any that has its ``need_indices()``.

    Example:
        >>> import shardwright as sw
        >>> table = sw.EmbeddingConfig(100, 8, "item", feature_names=["item"])
        >>> sharder = sw.EmbeddingCollectionSharder({"optimizer": "adam", "learning_rate": 0.01})
        >>> model = sw.DistributedModelParallel(
        ...     sw.EmbeddingCollection([table]), env=sw.ShardingEnv.local(device_type="cpu"), sharders=[sharder]
        ... )
        >>> model(sw.KeyedJaggedTensor.from_lists({"item": [[1, 2], [3]]}))["item"].values().shape
        torch.Size([3, 8])
    """

    module_type: ClassVar[type[nn.Module]] = EmbeddingCollection
    sharded_type: ClassVar[type[ShardedCollection]] = ShardedEmbeddingCollection
