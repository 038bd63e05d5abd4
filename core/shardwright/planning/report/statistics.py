"""Costs of a plan as JSON data: the load of each rank, and the cost of each table.

Legend: W ranks.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from shardwright.planning.arrays import Floats
from shardwright.planning.options.search_space import averaging_costs, traffic_bytes
from shardwright.planning.search.loaded import LoadedPlan


def rank_data(plan: LoadedPlan) -> list[dict[str, Any]]:
    """The load of each rank.

    Returns:
        For each rank its number ``rank``; by memory tier ``used_bytes``, ``usable_bytes``, which is all but what is
        reserved, and ``capacity_bytes``; ``time_ms`` of all its shards together, and the parts of that by phase,
        ``phases_ms``; ``input_bytes`` and ``output_bytes``, which its shards receive and send in a step;
        ``num_shards`` by abbreviation of a sharding type; ``types``, by name of a sharding type the ``time_ms`` and
        ``used_bytes`` of its shards; ``averaged_bytes`` of weights and optimizer state, averaged with its replicas.
    """
    space = plan.space
    received, sent = map(plan.by_rank, traffic_bytes(space.options, space.topology))
    averaged = averaged_on_ranks(plan)
    return [
        {
            "rank": rank,
            "used_bytes": dict(zip(space.tiers, plan.used_bytes[rank].tolist(), strict=True)),
            "usable_bytes": dict(zip(space.tiers, space.capacity_bytes[rank].tolist(), strict=True)),
            "capacity_bytes": dict(
                zip(space.tiers, space.topology.capacity_bytes[rank].tolist(), strict=True)
            ),
            "time_ms": float(plan.load_ms[rank]),
            "phases_ms": {phase: float(times[rank]) for phase, times in plan.phases_ms.items()},
            "input_bytes": float(received[rank]),
            "output_bytes": float(sent[rank]),
            "num_shards": dict(sorted(counts.items())),
            "types": types,
            "averaged_bytes": float(averaged[rank]),
        }
        for rank, (counts, types) in enumerate(_by_type(plan))
    ]


def _by_type(plan: LoadedPlan) -> list[tuple[dict[str, int], dict[str, dict[str, Any]]]]:
    """Every rank's shards by sharding type: abbreviation -> their number, name -> their time and memory."""
    space, options = plan.space, plan.space.options
    columns = [np.ones(options.num_shards), space.class_ms, *space.memory_bytes.T]
    found: list[tuple[dict[str, int], dict[str, dict[str, Any]]]]
    found = [({}, {}) for _ in range(space.topology.world_size)]
    for code, kind in enumerate(options.sharding_types):
        is_own = options.sharding_type[options.option] == code
        sums = np.stack([plan.by_rank((column.T * is_own).T) for column in columns], axis=1)
        for (counts, totals), (number, time_ms, *used) in zip(found, sums.tolist(), strict=True):
            if number:
                counts[kind.abbreviation] = counts.get(kind.abbreviation, 0) + int(number)
                used_bytes = dict(zip(space.tiers, map(int, used), strict=True))
                totals[kind.name] = {"time_ms": time_ms, "used_bytes": used_bytes}
    return found


def table_data(plan: LoadedPlan) -> list[dict[str, Any]]:
    """The cost of each table.

    Returns:
        For each table its ``path`` of module and name; ``num_embeddings`` rows and ``embedding_dim`` columns; the name
        of its ``sharding_type`` with the ``abbreviation``, and the ``variant`` of its layout; its ``compute_kernel``;
        ``time_ms`` and, by memory tier, ``used_bytes`` of all its shards together; ``ranks``, one for each shard; true
        for ``is_replicated`` if every rank has a copy; ``qcomms_config``, the codecs of its results and gradients.
    """
    space, options = plan.space, plan.space.options
    return [
        {
            "path": table.path,
            "num_embeddings": table.num_embeddings,
            "embedding_dim": table.embedding_dim,
            "sharding_type": options.type_of(option).name,
            "abbreviation": options.type_of(option).abbreviation,
            "variant": options.layouts[option].variant,
            "compute_kernel": options.kernel_of(option).name,
            "time_ms": float(time_ms),
            "used_bytes": dict(zip(space.tiers, space.total_bytes[option].tolist(), strict=True)),
            "ranks": list(ranks),
            "is_replicated": options.layouts[option].is_replicated,
            "qcomms_config": table.qcomms_config and attrs.asdict(table.qcomms_config),
        }
        for table, option, ranks, time_ms in zip(
            options.all_tables, plan.proposal.tolist(), plan.ranks_of_tables, plan.table_ms, strict=True
        )
    ]


def averaged_on_ranks(plan: LoadedPlan) -> Floats:
    """Weights and state that each rank averages with its replicas in other sharding groups, bytes: ``[W]``."""
    return plan.by_rank(averaging_costs(plan.space.options, plan.space.topology)[0])
