"""Costs of a plan, as values: the load of each rank, and the cost of each table.

Legend: A tables, K shards of the plan, W ranks, M memory tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.options.averaging import averaged_bytes
from shardwright.planning.options.search_space import SearchSpace, traffic_bytes
from shardwright.planning.plan.sharding import ranks_text
from shardwright.planning.search.placement import Chosen, PlacedPlan, ranks_of_tables
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
    """The statistics of a plan.

    Args:
        space: options and costs.
        plan: option of each table, and the places of its shards.
    """

    space: SearchSpace
    plan: PlacedPlan

    @property
    def proposal(self) -> Ints:
        """The option of each table: ``[A]``."""
        return self.plan.proposal

    @cached_property
    def ranks_of_tables(self) -> Sequence[tuple[int, ...]]:
        """The ranks of the shards of each table."""
        return ranks_of_tables(self.space, self.proposal, self.plan.ranks)

    @cached_property
    def shard_rank(self) -> Ints:
        """The rank of each shard: ``[K]``."""
        return np.concatenate([np.asarray(ranks, dtype=np.int64) for ranks in self.ranks_of_tables])

    @cached_property
    def shard_run(self) -> Ints:
        """The run of equal shards that each shard is of: ``[K]``."""
        runs = Chosen.of(self.space, self.proposal).run
        return np.repeat(runs, self.space.options.count[runs])

    @cached_property
    def shard_table(self) -> Ints:
        """The table of each shard: ``[K]``."""
        return np.repeat(np.arange(len(self.proposal)), [len(ranks) for ranks in self.ranks_of_tables])

    @cached_property
    def used_bytes(self) -> Ints:
        """Bytes on each rank, by tier: ``[W, M]``."""
        columns = [self._by_rank(self.space.memory_bytes[:, tier]) for tier in range(len(self.space.tiers))]
        return np.stack(columns, axis=1).astype(np.int64)

    @cached_property
    def time_ms(self) -> Floats:
        """The time of each rank's shards together: ``[W]``."""
        return self._by_rank(self.space.cost_ms)

    @cached_property
    def phases_ms(self) -> Mapping[str, Floats]:
        """Phase -> the time of each rank's shards in it: ``[W]``."""
        return {phase: self._by_rank(column) for phase, column in self.space.phases.items()}

    @cached_property
    def averaged_bytes(self) -> Floats:
        """Weights and state that each rank averages with its replicas in other sharding groups: ``[W]``."""
        if self.space.topology.replicas is None:
            return np.zeros(self.space.topology.world_size)
        return self._by_rank(averaged_bytes(self.space.options))

    def _by_rank(self, column: Any) -> Floats:
        """A column over runs, added up over each rank's shards: ``[W]``."""
        values = column[self.shard_run].astype(np.float64)
        total: Floats = np.bincount(
            self.shard_rank, weights=values, minlength=self.space.topology.world_size
        ).astype(np.float64)
        return total

    @cached_property
    def ranks(self) -> tuple[RankStatistics, ...]:
        """Statistics of each rank."""
        space, tiers = self.space, self.space.tiers
        received, sent = map(self._by_rank, traffic_bytes(space.options, space.topology))
        usable, capacity = space.capacity_bytes.tolist(), space.topology.capacity_bytes.tolist()
        return tuple(
            RankStatistics(
                rank=rank,
                used_bytes=dict(zip(tiers, self.used_bytes[rank].tolist(), strict=True)),
                usable_bytes=dict(zip(tiers, usable[rank], strict=True)),
                capacity_bytes=dict(zip(tiers, capacity[rank], strict=True)),
                time_ms=float(self.time_ms[rank]),
                phases_ms={phase: float(times[rank]) for phase, times in self.phases_ms.items()},
                input_bytes=float(received[rank]),
                output_bytes=float(sent[rank]),
                num_shards=counts,
                types=types,
                averaged_bytes=float(self.averaged_bytes[rank]),
            )
            for rank, (counts, types) in enumerate(self._by_type())
        )

    def _by_type(self) -> list[tuple[dict[str, int], dict[str, dict[str, Any]]]]:
        """Every rank's shards by sharding type: abbreviation -> their number, name -> their time and memory."""
        space, world_size = self.space, self.space.topology.world_size
        types = space.options.sharding_types
        kinds = space.options.sharding_type[space.options.option[self.shard_run]]
        cells = self.shard_rank * len(types) + kinds
        columns = [np.ones(space.options.num_shards), space.cost_ms, *space.memory_bytes.T]
        sums = np.stack([np.bincount(cells, one[self.shard_run], world_size * len(types)) for one in columns])
        found: list[tuple[dict[str, int], dict[str, dict[str, Any]]]] = [({}, {}) for _ in range(world_size)]
        for cell in np.unique(cells).tolist():
            (counts, totals), kind = found[cell // len(types)], types[cell % len(types)]
            number, time_ms, *used = sums[:, cell].tolist()
            counts[kind.abbreviation] = counts.get(kind.abbreviation, 0) + int(number)
            used_bytes = dict(zip(space.tiers, map(int, used), strict=True))
            totals[kind.name] = {"time_ms": time_ms, "used_bytes": used_bytes}
        return [(dict(sorted(counts.items())), totals) for counts, totals in found]

    @cached_property
    def tables(self) -> tuple[TableStatistics, ...]:
        """Statistics of each table."""
        options, space = self.space.options, self.space
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
                options.all_tables, self.proposal.tolist(), self.ranks_of_tables, strict=True
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
