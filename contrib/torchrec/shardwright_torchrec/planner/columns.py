"""Shardwright's columns as TorchRec's `ShardingOption`s, and back.

Legend: A tables, O options, S runs of equal shards of an option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

import shardwright as sw
from shardwright_torchrec.parallel.kernel_names import torchrec_name
from shardwright_torchrec.planner.types import PartitionByType, Perf, Shard, ShardingOption, Storage

PHASES: Mapping[str, str] = {
    "forward_compute": "fwd_compute",
    "forward_communication": "fwd_comms",
    "backward_compute": "bwd_compute",
    "backward_communication": "bwd_comms",
    "prefetch": "prefetch_compute",
}
"""Phases of the estimator `torchrec` -> fields of `Perf`."""

_FREE = -1  # rank or gang of a shard that has none yet


def options_of(options: sw.Options, table: int, number: int) -> list[ShardingOption]:
    """The options of a table.

    Args:
        options: the columns.
        table: index of the distinct table.
        number: index of the table among all.
    """
    first, last = options.first_option[table : table + 2].tolist()
    return [_option(options, index, options.all_tables[number]) for index in range(first, last)]


def _option(options: sw.Options, index: int, table: sw.TableSpec) -> ShardingOption:
    distinct = int(options.table[index])
    bags, ids = float(options.bags_per_batch[distinct]), float(options.ids_per_batch[distinct])
    features = max(table.num_features, 1)
    batch_size = max(round((bags if table.pooling.value != "NONE" else ids) / features), 1)
    option = ShardingOption(
        name=table.name,
        tensor=_weights(table),
        module=(table.module, None),
        input_lengths=[ids / features / batch_size] * features,
        batch_size=batch_size,
        sharding_type=options.type_of(index).name,
        partition_by=_partition_by(options, index).value,
        compute_kernel=torchrec_name(options.kernel_of(index).name),
        shards=_shards(options, index),
        is_pooled=table.pooling.value != "NONE",
        cache_params=table.cache,
        feature_names=list(table.feature_names),
    )
    option.index, option.own_kernel = index, options.kernel_of(index).name
    return option


def _weights(table: sw.TableSpec) -> object:
    import torch

    return torch.empty(table.num_embeddings, table.embedding_dim, device="meta")


def _shards(options: sw.Options, index: int) -> list[Shard]:
    """The shards of an option, in the order of its runs."""
    return [
        Shard(
            [block.num_rows, block.num_columns],
            [block.rows.bounds[0] if block.rows.bounds else 0, block.columns.start],
            rank=block.rank,
        )
        for block in options.layouts[index].blocks
    ]


def _partition_by(options: sw.Options, index: int) -> PartitionByType:
    runs = options.shards_of(index)
    if (options.rank[runs] != _FREE).all():
        return PartitionByType.UNIFORM
    gangs = set(options.gang[runs].tolist()) - {_FREE}
    if not gangs:
        return PartitionByType.DEVICE
    return PartitionByType.HOST if len(gangs) == 1 else PartitionByType.MULTI_HOST


def set_costs(
    found: Sequence[ShardingOption],
    options: sw.Options,
    phases: Mapping[str, npt.NDArray[np.float64]],
    memory: Mapping[str, npt.NDArray[np.float64]],
) -> None:
    """Set what estimators say of each run as costs of its shards.

    Args:
        found: options that `options_of` gave.
        options: the columns that they are of.
        phases: milliseconds by phase, ``[S]``.
        memory: bytes by tier, ``[S]``.
    """
    for option in found:
        runs = options.shards_of(option.index)
        numbers = np.repeat(np.arange(runs.start, runs.stop), options.count[runs])
        for shard, run in zip(option.shards, numbers.tolist(), strict=True):
            if phases:
                shard.perf = _perf(phases, run)
            if memory:
                shard.storage = Storage(
                    **{tier: int(memory[tier][run]) if tier in memory else 0 for tier in ("hbm", "ddr")}
                )


def _perf(phases: Mapping[str, npt.NDArray[np.float64]], run: int) -> Perf:
    """A run's times; phases that TorchRec does not know count as forward compute."""
    values = dict.fromkeys(PHASES.values(), 0.0)
    for phase, column in phases.items():
        values[PHASES.get(phase, "fwd_compute")] += float(column[run])
    return Perf(**values)


def values_of(
    found: Sequence[ShardingOption], options: sw.Options, value: Callable[[Shard], float]
) -> npt.NDArray[np.float64]:
    """A value of the first shard of each run: ``[S]``."""
    column = np.zeros(options.num_shards)
    for option in found:
        runs = options.shards_of(option.index)
        firsts = np.cumsum(options.count[runs]) - options.count[runs]
        for run, first in zip(range(runs.start, runs.stop), firsts.tolist(), strict=True):
            column[run] = value(option.shards[first])
    return column
