"""Costs of a plan, as values: the load of each rank, and the cost of each table.

Legend: W ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs
import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Floats
from shardwright.planning.options.averaging import averaged_bytes
from shardwright.planning.options.search_space import traffic_bytes
from shardwright.planning.plan.sharding import ranks_text
from shardwright.planning.search.placement import LoadedPlan
from shardwright.planning.tables.codecs import QCommsConfig
from shardwright.planning.text import bytes_text


@frozen
class RankStatistics:
    """One rank.

    Args:
        rank: its number.
        used_bytes: memory tier -> what its shards take.
        usable_bytes: memory tier -> what they may take: all but what is reserved.
        capacity_bytes: memory tier -> what there is.
        time_ms: time of all its shards together, ms.
        phases_ms: phase of a step -> the part of that.
        input_bytes: bytes that its shards receive in a step.
        output_bytes: bytes that its shards send in a step.
        num_shards: abbreviation of a sharding type -> how many of its shards.
        types: name of a sharding type -> `time_ms` and `used_bytes` of its shards.
        averaged_bytes: weights and optimizer state that it averages with its replicas in other sharding groups.
    """

    rank: int
    used_bytes: Mapping[str, int]
    usable_bytes: Mapping[str, int]
    capacity_bytes: Mapping[str, int]
    time_ms: float
    phases_ms: Mapping[str, float]
    input_bytes: float
    output_bytes: float
    num_shards: Mapping[str, int]
    types: Mapping[str, Mapping[str, Any]]
    averaged_bytes: float = 0.0


@frozen
class TableStatistics:
    """One table.

    Args:
        path: its module and name.
        num_embeddings: rows.
        embedding_dim: columns.
        sharding_type: name of its sharding type.
        abbreviation: abbreviation of the sharding type.
        variant: variant of the layout; empty where there is one only.
        compute_kernel: name of its kernel.
        time_ms: time of all its shards together, ms.
        used_bytes: memory tier -> what all its shards take together.
        ranks: the rank of each shard.
        is_replicated: every rank has a copy.
        qcomms_config: the codecs that its results and gradients travel by; ``None`` where they travel as they are.
    """

    path: str
    num_embeddings: int
    embedding_dim: int
    sharding_type: str
    abbreviation: str
    variant: str
    compute_kernel: str
    time_ms: float
    used_bytes: Mapping[str, int]
    ranks: tuple[int, ...]
    is_replicated: bool = False
    qcomms_config: QCommsConfig | None = None

    @property
    def ranks_text(self) -> str:
        """``0-3``, and ``0-3, a copy on each`` where it is replicated."""
        return ranks_text(self.ranks) + (
            ", a copy on each" if self.is_replicated and len(self.ranks) > 1 else ""
        )

    @property
    def sharding(self) -> str:
        """``RW (row_wise)``."""
        return f"{self.abbreviation} ({self.sharding_type}{f', {self.variant}' if self.variant else ''})"


@frozen(eq=False, slots=False)
class Statistics:
    """The statistics of a plan."""

    plan: LoadedPlan

    @cached_property
    def ranks(self) -> tuple[RankStatistics, ...]:
        """Statistics of each rank."""
        plan, space = self.plan, self.plan.space
        received, sent = map(plan.by_rank, traffic_bytes(space.options, space.topology))
        averaged = averaged_on_ranks(plan)
        return tuple(
            RankStatistics(
                rank=rank,
                used_bytes=dict(zip(space.tiers, plan.used_bytes[rank].tolist(), strict=True)),
                usable_bytes=dict(zip(space.tiers, space.capacity_bytes[rank].tolist(), strict=True)),
                capacity_bytes=dict(
                    zip(space.tiers, space.topology.capacity_bytes[rank].tolist(), strict=True)
                ),
                time_ms=float(plan.load_ms[rank]),
                phases_ms={phase: float(times[rank]) for phase, times in plan.phases_ms.items()},
                input_bytes=float(received[rank]),
                output_bytes=float(sent[rank]),
                num_shards=dict(sorted(counts.items())),
                types=types,
                averaged_bytes=float(averaged[rank]),
            )
            for rank, (counts, types) in enumerate(self._by_type())
        )

    def _by_type(self) -> list[tuple[dict[str, int], dict[str, dict[str, Any]]]]:
        """Every rank's shards by sharding type: abbreviation -> their number, name -> their time and memory."""
        space, options = self.plan.space, self.plan.space.options
        columns = np.column_stack([np.ones(options.num_shards), space.cost_ms, space.memory_bytes])
        found: list[tuple[dict[str, int], dict[str, dict[str, Any]]]]
        found = [({}, {}) for _ in range(space.topology.world_size)]
        for code, kind in enumerate(options.sharding_types):
            is_own = options.sharding_type[options.option] == code
            sums = np.stack([self.plan.by_rank(np.where(is_own, column, 0)) for column in columns.T], axis=1)
            for (counts, totals), (number, time_ms, *used) in zip(found, sums.tolist(), strict=True):
                if number:
                    counts[kind.abbreviation] = counts.get(kind.abbreviation, 0) + int(number)
                    used_bytes = dict(zip(space.tiers, map(int, used), strict=True))
                    totals[kind.name] = {"time_ms": time_ms, "used_bytes": used_bytes}
        return found

    @cached_property
    def tables(self) -> tuple[TableStatistics, ...]:
        """Statistics of each table."""
        plan, space, options = self.plan, self.plan.space, self.plan.space.options
        return tuple(
            TableStatistics(
                path=table.path,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                sharding_type=options.type_of(option).name,
                abbreviation=options.type_of(option).abbreviation,
                variant=options.layouts[option].variant,
                compute_kernel=options.kernel_of(option).name,
                time_ms=float(space.total_cost_ms[option]),
                used_bytes=dict(zip(space.tiers, space.total_bytes[option].tolist(), strict=True)),
                ranks=ranks,
                is_replicated=options.layouts[option].is_replicated,
                qcomms_config=table.qcomms_config,
            )
            for table, option, ranks in zip(
                options.all_tables, plan.proposal.tolist(), plan.ranks_of_tables, strict=True
            )
        )

    @property
    def kernels(self) -> Mapping[str, int]:
        """Compute kernel -> how many tables it serves."""
        return dict(sorted(Counter(table.compute_kernel for table in self.tables).items()))

    def to_data(self) -> dict[str, Any]:
        """Return the statistics as JSON data."""
        return {
            "ranks": [_plain(rank) for rank in self.ranks],
            "tables": [_plain(table) for table in self.tables],
            "compute_kernels": dict(self.kernels),
        }


def averaged_on_ranks(plan: LoadedPlan) -> Floats:
    """Weights and state that each rank averages with its replicas in other sharding groups, bytes: ``[W]``."""
    if plan.space.topology.replicas is None:
        return np.zeros(plan.space.topology.world_size)
    return plan.by_rank(averaged_bytes(plan.space.options))


def _plain(value: Any) -> dict[str, Any]:
    fields = attrs.asdict(value)
    return {name: list(item) if isinstance(item, tuple) else item for name, item in fields.items()}


def rank_cells(rank: RankStatistics) -> tuple[str, ...]:
    """A rank's row of a table: its number, memory tiers, time, input, output, shards."""
    counts = ", ".join(f"{name}: {count}" for name, count in rank.num_shards.items())
    return (
        str(rank.rank),
        *(_share(used, rank.capacity_bytes[tier]) for tier, used in rank.used_bytes.items()),
        f"{rank.time_ms:.4g}",
        f"{rank.input_bytes / 1e6:.2f}",
        f"{rank.output_bytes / 1e6:.2f}",
        counts or "none",
    )


def _share(used: float, capacity: float) -> str:
    percent = 100 * used / capacity if capacity else 0.0
    return f"{bytes_text(used)} ({percent:.0f}%)"
