"""``ShardedEmbeddingBagCollection``: an ``EmbeddingBagCollection`` over many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from shardwright.modules.embedding_modules import EmbeddingBagCollection, TableCollection
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import EmbeddingBagConfig, TableSpec
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
from shardwright.sparse import KeyedJaggedTensor, KeyedTensor


class ShardedEmbeddingBagCollection(ShardedCollection):
    """The sharded form of an :class:`EmbeddingBagCollection`: the same input and output, tables on many ranks."""

    def __init__(self, inputs: ShardingInputs) -> None:
        super().__init__(inputs, tables_name="embedding_bags")
        self._dims = [output.dim for output in self._engine.collection.outputs]

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Pool the bags of this rank's batch; every rank makes this call in the same step.

        Args:
            features: this rank's batch, on this rank's device; ranks may have different batch sizes.

        Returns:
            The pooled output ``[B, C]`` float32, waited for on first use.

        Raises:
            InvalidInputError: a rank's batch is wrong; the same text on every rank, the model unchanged.
        """
        if torch.compiler.is_compiling():
            return waited_for(self, features)
        return self._look_up(features)

    @untraced
    def _look_up(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        return self.output_dist(self.compute(self.input_dist(features)))

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
class EmbeddingBagCollectionSharder(ModuleSharder):
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
    ) -> ShardedEmbeddingBagCollection:
        """See :meth:`ModuleSharder.shard`."""
        assert isinstance(module, TableCollection)  # find_sharder
        return shard_collection(
            ShardedEmbeddingBagCollection, self, module, params, env, device, path=module_fqn or ""
        )
