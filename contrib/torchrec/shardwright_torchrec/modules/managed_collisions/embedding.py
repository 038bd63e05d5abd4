"""Embedding collections behind maps of ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

import shardwright as sw
from shardwright_torchrec.modules.managed_collisions.maps import (
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from shardwright_torchrec.modules.managed_collisions.policies import DistanceLFU_EvictionPolicy
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder


class BaseManagedCollisionEmbeddingCollection(torch.nn.Module):
    """An embedding collection whose ids are mapped first.

    Sharders shard the collection within, under any sharding type; the maps are the same on all ranks.

    Args:
        embedding_module: the collection.
        managed_collision_collection: maps of its tables.
        return_remapped_features: give the mapped features beside the embeddings.
        allow_in_place_embed_weight_update: not needed: a row that changes its id keeps its values.

    Raises:
        InvalidInputError: the maps are of other tables.
    """

    def __init__(
        self,
        embedding_module: sw.EmbeddingBagCollection | sw.EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        tables = [config.name for config in configs_of(embedding_module)]
        mapped = [config.name for config in managed_collision_collection.embedding_configs()]
        if sorted(tables) != sorted(mapped):
            raise sw.InvalidInputError(f"the collection has the tables {tables}, the maps are of {mapped}")
        self._managed_collision_collection = managed_collision_collection
        self._return_remapped_features = return_remapped_features
        self._embedding_module = embedding_module

    def forward(
        self, features: sw.KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[Any, sw.KeyedJaggedTensor | None]:
        """Embeddings, and the mapped features if they are asked for."""
        mapped = self._managed_collision_collection(features, mutate_miss_lengths)
        embeddings = self._embedding_module(mapped)
        self._managed_collision_collection.evict()
        return embeddings, mapped if self._return_remapped_features else None


def configs_of(collection: torch.nn.Module) -> Sequence[Any]:
    """Configurations of a collection's tables."""
    if isinstance(collection, sw.EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingBagCollection` whose ids are mapped first; see `BaseManagedCollisionEmbeddingCollection`."""

    def __init__(
        self,
        embedding_bag_collection: sw.EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_bag_collection(self) -> Any:
        return self._embedding_module


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingCollection` whose ids are mapped first; see `BaseManagedCollisionEmbeddingCollection`."""

    def __init__(
        self,
        embedding_collection: sw.EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_collection(self) -> Any:
        return self._embedding_module


class ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards the collection within; the maps stay whole on every rank.

    Args:
        ebc_sharder: sharder whose settings are taken.
        mc_sharder: not needed.
        fused_params: settings, instead.
        qcomm_codecs_registry: see `shardwright.ModuleSharder`.
    """

    def __init__(
        self,
        ebc_sharder: sw.ModuleSharder | None = None,
        mc_sharder: Any = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(_settings(ebc_sharder, fused_params), qcomm_codecs_registry)


class ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards the collection within; the maps stay whole on every rank.

    Args:
        ec_sharder: sharder whose settings are taken.
        mc_sharder: not needed.
        fused_params: settings, instead.
        qcomm_codecs_registry: see `shardwright.ModuleSharder`.
    """

    def __init__(
        self,
        ec_sharder: sw.ModuleSharder | None = None,
        mc_sharder: Any = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        super().__init__(_settings(ec_sharder, fused_params), qcomm_codecs_registry)


def _settings(
    sharder: sw.ModuleSharder | None, fused_params: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    return sharder.fused_params if sharder is not None and fused_params is None else fused_params


class _Adapter(torch.nn.Module):
    """The part of both adapters that does not depend on the collection's class.

    Args:
        tables: configurations.
        input_hash_size: number of ids that there may be.
        device: device of the maps; tables are on `meta` until they are sharded.
        world_size: not needed.
        eviction_interval: steps between updates of the maps.
        allow_in_place_embed_weight_update: not needed.
        zch_method: `"sort_zch"`.
        mpzch_num_buckets: not needed.
        mpzch_max_probe: not needed.

    Raises:
        UnsupportedError: another method.
    """

    _name: ClassVar[str]
    _classes: ClassVar[tuple[type[torch.nn.Module], type[BaseManagedCollisionEmbeddingCollection]]]

    def __init__(
        self,
        tables: Sequence[Any],
        input_hash_size: int,
        device: torch.device,
        world_size: int,
        eviction_interval: int = 1,
        allow_in_place_embed_weight_update: bool = False,
        zch_method: str = "",
        mpzch_num_buckets: int | None = 80,
        mpzch_max_probe: int | None = 100,
    ) -> None:
        super().__init__()
        if zch_method != "sort_zch":
            raise sw.UnsupportedError(f"zch_method={zch_method!r} is not supported. Known: 'sort_zch'")
        maps: dict[str, Any] = {
            table.name: MCHManagedCollisionModule(
                table.num_embeddings,
                device,
                DistanceLFU_EvictionPolicy(),
                eviction_interval=eviction_interval,
                input_hash_size=input_hash_size,
            )
            for table in tables
        }
        collection, behind_maps = self._classes
        unsharded = collection(tables, device=torch.device("meta"))
        self.add_module(self._name, behind_maps(unsharded, ManagedCollisionCollection(maps, tables), True))
        self.remapped_ids: sw.KeyedJaggedTensor | None = None

    def _embeddings(self, features: sw.KeyedJaggedTensor) -> Any:
        embeddings, self.remapped_ids = self.get_submodule(self._name)(features)
        return embeddings

    def _configs(self) -> Sequence[Any]:
        maps: Any = self.get_submodule(self._name)._managed_collision_collection
        configs: Sequence[Any] = maps.embedding_configs()
        return configs


class McEmbeddingBagCollectionAdapter(_Adapter):
    """A collection of tables behind maps, in the place of an `EmbeddingBagCollection`; arguments as `_Adapter`'s."""

    _name = "mc_embedding_bag_collection"
    _classes = (sw.EmbeddingBagCollection, ManagedCollisionEmbeddingBagCollection)

    def forward(self, input_kjt: sw.KeyedJaggedTensor) -> Any:
        """Embeddings; the mapped features are kept in `remapped_ids`."""
        return self._embeddings(input_kjt)

    def embedding_bag_configs(self) -> Sequence[Any]:
        """Configurations of the tables."""
        return self._configs()


class McEmbeddingCollectionAdapter(_Adapter):
    """A collection of tables behind maps, in the place of an `EmbeddingCollection`; arguments as `_Adapter`'s."""

    _name = "mc_embedding_collection"
    _classes = (sw.EmbeddingCollection, ManagedCollisionEmbeddingCollection)

    def forward(self, input: sw.KeyedJaggedTensor) -> Any:
        """Embeddings; the mapped features are kept in `remapped_ids`."""
        return self._embeddings(input)

    def embedding_configs(self) -> Sequence[Any]:
        """Configurations of the tables."""
        return self._configs()
