"""``ShardedEmbeddingCollection``: an ``EmbeddingCollection`` over many ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwright.modules.embedding_modules import EmbeddingCollection, TableCollection
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import EmbeddingConfig, TableSpec
from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.collections.sharded_collection import (
    ShardedCollection,
    ShardingInputs,
    shard_collection,
    specs_of,
)
from shardwright.runtime.sharded.collections.sharded_module import ModuleSharder, register_sharder
from shardwright.runtime.step.awaitable import LazyAwaitable, LazyCall
from shardwright.runtime.step.compiling import untraced, waited_for
from shardwright.runtime.step.engine import EngineStep
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor


class ShardedEmbeddingCollection(ShardedCollection):
    """The sharded form of an :class:`EmbeddingCollection`: one vector for each id, in the order of the ids."""

    def __init__(self, inputs: ShardingInputs) -> None:
        super().__init__(inputs, tables_name="embeddings")
        unsharded: Any = inputs.unsharded
        self.need_indices = bool(unsharded.need_indices())

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up each id of this rank's batch; every rank makes this call in the same step.

        Args:
            features: this rank's batch, on this rank's device; ranks may have different batch sizes.

        Returns:
            For each output name the rows ``[ids, D]`` float32 with the input's lengths, waited for on first use.

        Raises:
            InvalidInputError: a rank's batch is wrong; the same text on every rank, the model unchanged.
        """
        if torch.compiler.is_compiling():
            return waited_for(self, features)
        return self._look_up(features)

    @untraced
    def _look_up(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return self.output_dist(self.compute(self.input_dist(features)))

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
            for output, rows in zip(self._engine.collection.outputs, values, strict=True)
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configurations."""
        return list(self._configs)


@register_sharder
class EmbeddingCollectionSharder(ModuleSharder):
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

    def tables(self, module: nn.Module, path: str = "") -> list[TableSpec]:
        """The specifications of the collection's tables, with their optimizers."""
        assert isinstance(module, TableCollection)  # find_sharder
        return specs_of(self, module, path)

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """See :meth:`ModuleSharder.shard`."""
        assert isinstance(module, TableCollection)  # find_sharder
        return shard_collection(
            ShardedEmbeddingCollection, self, module, params, env, device, path=module_fqn or ""
        )
