"""`ShardedQuantEmbeddingBagCollection` and `ShardedQuantEmbeddingCollection`: quantised tables over many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from shardwright.errors import UnsupportedError
from shardwright.modules.quantized.collections import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantizedCollection,
)
from shardwright.planning.plan.plan import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection, shard_collection
from shardwright.runtime.sharded.collections.sharded_embedding import ShardedEmbeddingCollection
from shardwright.runtime.sharded.collections.sharded_embedding_bag import ShardedEmbeddingBagCollection
from shardwright.runtime.sharded.collections.sharded_module import ModuleSharder, register_sharder
from shardwright.runtime.sharded.quantized.sharded_table import ShardedQuantizedTable
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable


class _QuantizedShards(ShardedCollection):
    """The common part of sharded quantised collections: rows come from the unsharded one, and stay as they are."""

    table_class: ClassVar[type[ShardedTable]] = ShardedQuantizedTable

    def take_weights(self, module: Any) -> None:
        """Take the unsharded module's rows over; on ``meta`` there are none, and those here stay zeros.

        Every rank has the module. Copies of a table begin as rank 0's.
        """
        if module.device.type == "meta":
            return
        for name, table in self.sharded_tables.items():
            assert isinstance(table, ShardedQuantizedTable)  # what table_class says
            table.take(module.quantized_rows(name))
            for local in table.state.local:
                if table.state.sharding.layout.dataflow_of(local.block).is_replicated:
                    self.env.communicator.broadcast(table.weight_of(local), 0)

    def reshard(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: rows that are not trained are cheap to shard anew.

        Raises:
            UnsupportedError: always.
        """
        self.check_moves(self.inputs.specs[0].module)

    def check_moves(self, path: str) -> None:
        """Refuse; see :meth:`ShardedCollection.check_moves`.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"the {type(self).__name__} at {path!r} does not move from one plan to another, since its rows are "
            "quantised: shard the unsharded model by the new one"
        )


class ShardedQuantEmbeddingBagCollection(_QuantizedShards, ShardedEmbeddingBagCollection):
    """The sharded form of a :class:`QuantEmbeddingBagCollection`; no gradients, no optimizer."""

    def _unsharded(self) -> nn.Module:  # type: ignore[override]  # what it is the sharded form of
        return QuantEmbeddingBagCollection(
            self.embedding_bag_configs(), self.is_weighted(), "meta", output_dtype=self.output_dtype
        )


class ShardedQuantEmbeddingCollection(_QuantizedShards, ShardedEmbeddingCollection):
    """The sharded form of a :class:`QuantEmbeddingCollection`; no gradients, no optimizer."""

    def _unsharded(self) -> nn.Module:  # type: ignore[override]  # what it is the sharded form of
        return QuantEmbeddingCollection(
            self.embedding_configs(), "meta", self.need_indices, output_dtype=self.output_dtype
        )


class _QuantizedSharder(ModuleSharder):
    """The common part of sharders of quantised collections."""

    sharded_type: ClassVar[type[ShardedCollection]]
    """Class of the sharded collection."""

    def tables(self, module: nn.Module, path: str = "") -> list[TableSpec]:
        """The specifications of the collection's tables: frozen, without optimizers.

        Raises:
            UnsupportedError: the sharder was given an optimizer, or a limit of gradients.
        """
        assert isinstance(module, QuantizedCollection)  # find_sharder
        asked = ("max_gradient",) * (self.max_gradient is not None)
        asked += ("optimizer",) * (not self.optimizer.is_assumed)
        if asked:
            raise UnsupportedError(
                f"the {type(module).__name__} at {path!r} is not trained, and its sharder's fused_params ask for "
                f"{' and '.join(asked)}: leave them out",
                subject=path,
                asked=asked[0],
            )
        return [
            TableSpec.from_config(
                config,
                module=path,
                is_weighted=module.is_weighted(),
                optimizer=None,
                qcomms_config=self.qcomm_codecs_registry,
                is_frozen=True,
            )
            for config in module.tables
        ]

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        """See :meth:`ModuleSharder.shard`."""
        assert isinstance(module, QuantizedCollection)  # find_sharder
        made = shard_collection(
            self.sharded_type,
            self,
            module,
            params,
            env,
            device,
            path=module_fqn or "",
            is_weighted=module.is_weighted(),
        )
        made.output_dtype = module.output_dtype
        if isinstance(made, ShardedQuantEmbeddingCollection):
            assert isinstance(module, QuantEmbeddingCollection)  # of which it is the sharded form
            made.need_indices = module.need_indices()
        return made


@register_sharder
class QuantEmbeddingBagCollectionSharder(_QuantizedSharder):
    """Shards :class:`QuantEmbeddingBagCollection`."""

    module_type: ClassVar[type[nn.Module]] = QuantEmbeddingBagCollection
    sharded_type: ClassVar[type[ShardedCollection]] = ShardedQuantEmbeddingBagCollection


@register_sharder
class QuantEmbeddingCollectionSharder(_QuantizedSharder):
    """Shards :class:`QuantEmbeddingCollection`."""

    module_type: ClassVar[type[nn.Module]] = QuantEmbeddingCollection
    sharded_type: ClassVar[type[ShardedCollection]] = ShardedQuantEmbeddingCollection
