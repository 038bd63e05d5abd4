"""Maps from ids of any size to rows of a table.

Legend: N ids of a batch, Z rows, U distinct ids of an interval. Ids of a map are sorted: a search finds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwright as sw
from shardwright_torchrec.modules.managed_collisions.policies import MCHEvictionPolicy

EMPTY = torch.iinfo(torch.int64).max
"""Id of a row that nobody has, so that such rows come last when sorted."""

Features = dict[str, sw.JaggedTensor]


def apply_mc_method_to_jt_dict(mc_module: torch.nn.Module, method: str, features_dict: Features) -> Features:
    """Call a method of a map, by its name, with features by table."""
    return getattr(mc_module, method)(features_dict)


class ManagedCollisionModule(torch.nn.Module, ABC):
    """A map from ids to rows.

    Args:
        device: device of the map.
    """

    def __init__(self, device: torch.device, *further: Any, **options: Any) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.process_group: Any = None
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=self.device))

    @abstractmethod
    def preprocess(self, features: Features) -> Features:
        """Ids before they are looked for."""

    @abstractmethod
    def profile(self, features: Features) -> Features:
        """Count the ids in training, and bring the map up to date when it is time."""

    @abstractmethod
    def remap(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Rows of ids."""

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Count ids in training, and give their rows.

        Args:
            features: ids by table.
            mutate_miss_lengths: not needed: an id without a row of its own gets the one for all such.
        """
        return self.remap(self.profile(self.preprocess(features)), mutate_miss_lengths)

    @abstractmethod
    def evict(self) -> Tensor | None:
        """Rows whose id has changed since the last call; `None` if no update was made."""

    @abstractmethod
    def output_size(self) -> int:
        """Number of rows."""

    @abstractmethod
    def input_size(self) -> int:
        """Number of ids that there may be."""

    @abstractmethod
    def open_slots(self) -> Tensor:
        """Number of rows that no id has ``[1]``."""

    def buckets(self) -> int:
        """Number of parts of the map: it is whole."""
        return 1


class MCHManagedCollisionModule(ManagedCollisionModule):
    """A map that gives the ids that matter most rows of their own, and all others the last row.

    Ids are counted in training. Once an interval those counted compete with those that have rows, by the scores of the
    policy; rows go from the losers to the winners. On several ranks all ids of an interval are gathered first, so every
    rank makes as many forward passes; `shardwright_torchrec`'s `DistributedModelParallel` joins the maps of its model.

    Args:
        zch_size: number of rows ``Z``.
        device: device of the map.
        eviction_policy: scores of ids.
        eviction_interval: steps between updates of the map.
        input_hash_size: second argument of `input_hash_func`.
        input_hash_func: function of ids and `input_hash_size`, applied first.
        mch_size: must be `None`.
        mch_hash_func: must be `None`.
        name: not needed.
        output_global_offset: added to rows.
        output_segments: not needed.
        buckets: not needed.

    Raises:
        InvalidInputError: sizes are not positive.
        UnsupportedError: a second table for ids without rows is asked for.
    """

    # Buffers, of which checkpoints have those that the policy needs.
    _mch_sorted_raw_ids: Tensor
    _mch_remapped_ids_mapping: Tensor
    _mch_counts: Tensor
    _mch_last_access_iter: Tensor

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = (2**63) - 1,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: Sequence[int] | None = None,
        buckets: int = 1,
    ) -> None:
        super().__init__(device)
        if zch_size < 1 or eviction_interval < 1:
            raise sw.InvalidInputError(
                f"zch_size and eviction_interval are from 1 on, got {zch_size} and {eviction_interval}"
            )
        if mch_size is not None or mch_hash_func is not None:
            raise sw.UnsupportedError(
                "mch_size and mch_hash_func: ids without a row of their own share the last"
            )
        self._zch_size, self._interval, self._offset = zch_size, eviction_interval, output_global_offset
        self._input_hash_size, self._input_hash_func = input_hash_size, input_hash_func
        self._policy = eviction_policy
        rows = torch.arange(zch_size, device=self.device) + output_global_offset
        self.register_buffer("_mch_sorted_raw_ids", torch.full_like(rows, EMPTY))
        self.register_buffer("_mch_remapped_ids_mapping", rows)
        for is_kept, state in (
            (eviction_policy.uses_counts, "_mch_counts"),
            (eviction_policy.uses_last_access, "_mch_last_access_iter"),
        ):
            self.register_buffer(state, torch.zeros_like(rows), persistent=is_kept)
        self._seen: list[Tensor] = []  # [3, U] of each step: ids, uses and the step
        self._evicted: list[Tensor] = []
        self._steps_of_interval = 0
        self.register_load_state_dict_post_hook(lambda module, keys: module.sort())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *further: Any) -> None:
        state_dict.pop(f"{prefix}_output_segments_tensor", None)  # TorchRec's parts of the map
        super()._load_from_state_dict(state_dict, prefix, *further)

    def preprocess(self, features: Features) -> Features:
        """Ids that `input_hash_func` makes of ids."""
        if self._input_hash_func is None:
            return features
        return {
            name: _with_values(ids, self._input_hash_func(ids.values(), self._input_hash_size))
            for name, ids in features.items()
        }

    @torch.no_grad()
    def profile(self, features: Features) -> Features:
        """Count the ids in training, and update the map at the end of an interval."""
        if not self.training:
            return features
        self._current_iter_tensor += 1
        step = int(self._current_iter_tensor)
        for ids in features.values():
            values, counts = ids.values().unique(return_counts=True)
            self._seen.append(torch.stack([values, counts, torch.full_like(values, step)]))
        self._steps_of_interval += 1
        if self._steps_of_interval == self._interval:
            self._update(step, *self._counted())
            self._seen, self._steps_of_interval = [], 0
        return features

    def _counted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Distinct ids of the interval, of all ranks: ids in order, uses, and step of the last use, ``[U]`` each."""
        seen = torch.cat(self._seen, dim=1)
        if self.process_group is not None:
            seen = torch.cat(_gathered(seen, self.process_group), dim=1)
        ids, place = seen[0].unique(return_inverse=True)
        counts = torch.zeros_like(ids).index_add_(0, place, seen[1])
        last = torch.zeros_like(ids).scatter_reduce_(0, place, seen[2], reduce="amax")
        return ids, counts, last

    def _update(self, step: int, ids: Tensor, counts: Tensor, last: Tensor) -> None:
        """Let ids compete for rows; new ones of equal scores in the order of their uses."""
        chosen = self._counting(counts)
        order = counts[chosen].argsort(descending=True, stable=True)
        ids, counts, last = (value[chosen][order] for value in (ids, counts, last))
        places, is_known = self._find(ids)
        self._mch_counts[places[is_known]] += counts[is_known]
        self._mch_last_access_iter[places[is_known]] = last[is_known]
        # The last entry is for ids without a row: it does not compete.
        competing = self._zch_size - 1
        states = (self._mch_sorted_raw_ids, self._mch_counts, self._mch_last_access_iter)
        newcomers = tuple(value[~is_known] for value in (ids, counts, last))
        all_counts, all_last = (
            torch.cat([state[:competing], new]) for state, new in zip(states[1:], newcomers[1:], strict=True)
        )
        ranking = self._policy.scores(all_counts, all_last, step).argsort(descending=True, stable=True)
        winners, losers = ranking[:competing], ranking[competing:]
        admitted, freed = winners[winners >= competing] - competing, losers[losers < competing]
        for state, new in zip(states, newcomers, strict=True):
            state[freed] = new[admitted]
        # TorchRec's values for the last entry, so that saved maps are the same.
        self._mch_counts[-1], self._mch_last_access_iter[-1] = EMPTY, step
        self._evicted.append(self._mch_remapped_ids_mapping[freed])
        self.sort()

    def _counting(self, counts: Tensor) -> Tensor:
        """Mask of the ids that the policy's filter lets compete ``[U]``; rank 0's, for filters that draw."""
        if self._policy.threshold_filtering_func is None or not len(counts):
            return torch.ones_like(counts, dtype=torch.bool)
        mask, _ = self._policy.threshold_filtering_func(counts)
        if self.process_group is not None:
            shared = mask.to(torch.uint8)
            dist.broadcast(shared, group=self.process_group, group_src=0)
            mask = shared.bool()
        return mask

    def sort(self) -> None:
        """Bring the map into the order of its ids."""
        order = self._mch_sorted_raw_ids.argsort(stable=True)
        for state in (
            *(self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping),
            *(self._mch_counts, self._mch_last_access_iter),
        ):
            state.copy_(state[order])

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Place of each id in the map, and a mask of those that are there."""
        places = torch.searchsorted(self._mch_sorted_raw_ids, ids).clamp(max=self._zch_size - 1)
        return places, (self._mch_sorted_raw_ids[places] == ids) & (ids != EMPTY)

    @torch.no_grad()
    def remap(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Row of each id; the last one for an id without a row of its own."""
        rest = self._offset + self._zch_size - 1
        found = {}
        for name, ids in features.items():
            places, is_known = self._find(ids.values())
            rows = self._mch_remapped_ids_mapping[places].where(
                is_known, torch.tensor(rest, device=self.device)
            )
            found[name] = _with_values(ids, rows)
        return found

    def evict(self) -> Tensor | None:
        """Rows whose id has changed since the last call; `None` if no update was made."""
        evicted, self._evicted = self._evicted, []
        return torch.cat(evicted).unique() if evicted else None

    def output_size(self) -> int:
        """Number of rows."""
        return self._zch_size

    def input_size(self) -> int:
        """Number of ids that there may be."""
        return self._input_hash_size

    def open_slots(self) -> Tensor:
        """Number of rows that no id has ``[1]``, without the last."""
        return (self._mch_sorted_raw_ids == EMPTY).sum().reshape(1) - 1


def _with_values(ids: sw.JaggedTensor, values: Tensor) -> sw.JaggedTensor:
    return sw.JaggedTensor(values=values, lengths=ids.lengths(), weights=ids.weights_or_none())


def _gathered(seen: Tensor, group: Any) -> list[Tensor]:
    """Columns of all ranks; each may have another number of them."""
    size = torch.tensor([seen.shape[1]], device=seen.device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    most = max(int(one) for one in sizes)
    padded = torch.nn.functional.pad(seen, (0, most - seen.shape[1]))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[:, : int(one)] for part, one in zip(parts, sizes, strict=True)]


class ManagedCollisionCollection(torch.nn.Module):
    """Maps of several tables.

    Args:
        managed_collision_modules: map by table; each has as many rows as its table.
        embedding_configs: configurations of the tables.
        need_preprocess: not needed: maps call their own.

    Raises:
        InvalidInputError: a table has no map, or another number of rows, or a feature belongs to two tables.
    """

    def __init__(
        self,
        managed_collision_modules: Mapping[str, ManagedCollisionModule],
        embedding_configs: Sequence[Any],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        self._managed_collision_modules = torch.nn.ModuleDict(managed_collision_modules)
        self._embedding_configs = list(embedding_configs)
        self._table_of: dict[str, str] = {}
        for config in embedding_configs:
            self._check(config, managed_collision_modules)

    def _check(self, config: Any, maps: Mapping[str, ManagedCollisionModule]) -> None:
        if config.name not in maps:
            raise sw.InvalidInputError(f"table {config.name!r} has no map. Maps: {sorted(maps)}")
        if (rows := maps[config.name].output_size()) != config.num_embeddings:
            raise sw.InvalidInputError(
                f"table {config.name!r} has {config.num_embeddings} rows, its map gives {rows}: give the map "
                f"zch_size={config.num_embeddings}"
            )
        for feature in config.feature_names:
            if (other := self._table_of.setdefault(feature, config.name)) != config.name:
                raise sw.InvalidInputError(
                    f"feature {feature!r} belongs to tables {other!r} and {config.name!r}, and can be mapped once"
                )

    def embedding_configs(self) -> Sequence[Any]:
        """Configurations of the tables."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """Number of parts of each map."""
        return {name: module.buckets() for name, module in self._managed_collision_modules.items()}

    def forward(
        self, features: sw.KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> sw.KeyedJaggedTensor:
        """The features with rows for ids; those that belong to no table are left as they are."""
        starts, values = features.offset_per_key(), features.values().clone()
        for name, module in self._managed_collision_modules.items():
            mine = [
                torch.arange(starts[number], starts[number + 1], device=values.device)
                for number, key in enumerate(features.keys())
                if self._table_of.get(key) == name
            ]
            if not mine:
                continue
            places = torch.cat(mine)
            ids = sw.JaggedTensor(values=features.values()[places], lengths=places.new_tensor([len(places)]))
            values[places] = module({name: ids}, mutate_miss_lengths)[name].values().to(values.dtype)
        return _with_keyed_values(features, values)

    def evict(self) -> dict[str, Tensor | None]:
        """Rows of each table whose id has changed since the last call."""
        return {name: module.evict() for name, module in self._managed_collision_modules.items()}

    def open_slots(self) -> dict[str, Tensor]:
        """Number of rows of each table that no id has."""
        return {name: module.open_slots() for name, module in self._managed_collision_modules.items()}


def _with_keyed_values(features: sw.KeyedJaggedTensor, values: Tensor) -> sw.KeyedJaggedTensor:
    varies = features.variable_stride_per_key()
    return sw.KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        lengths=features.lengths(),
        weights=features.weights_or_none(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
