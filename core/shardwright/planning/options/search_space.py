"""The search space: options with their costs, and what the ranks can hold."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from attrs import frozen

from shardwright.arguments import brief
from shardwright.contracts.estimator import STORAGE, Estimator
from shardwright.errors import PlanningError
from shardwright.host.extensions import ask_at
from shardwright.host.process import process_host
from shardwright.planning.arrays import FREE, Bools, Floats, Ints
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.plugin_calls import calling
from shardwright.planning.tables.codecs import FLOAT_BYTES, QCommsConfig

AVERAGING = "averaging"
"""Name of the phase of a step in which the replicas of other sharding groups are averaged, and of what tells it."""

# A shard of more fits nowhere (256 TiB), and sums of what is no more stay within 64 bits.
_MOST_BYTES = float(1 << 48)
# Sums over all shards and ranks of what is no more, and products of two such sums, are finite.
_MOST_ESTIMATE = 1e100
# More than any table takes: 2**63 rows of 2**63 columns with what optimizers keep of them are less.
_MOST_ESTIMATED_BYTES = 1e40


@frozen(eq=False)
class SearchSpace:
    """Options with their costs: columns over ``S`` runs of shards, ``O`` options, ``M`` memory tiers, ``W`` ranks.

    Ranks of one speed are a class: ``C`` classes, of :attr:`Topology.classes`. What rates or bounds plans goes by costs
    by class; who needs no more than to compare shards goes by the mean over ranks, ``cost_ms``.

    Args:
        options: the options of all tables.
        topology: the ranks.
        phases: phase of a step -> milliseconds that each shard of a run adds to its rank: ``[S]``, or ``[S, C]`` where
            there are several classes of ranks.
        memory_bytes: bytes of each shard of a run, ``[S, M]``.
        capacity_bytes: bytes that may be used on each rank, after reservations: ``[W, M]``.
        objective: measure that rates plans, a name in :data:`~shardwright.planning.search.objectives.OBJECTIVES`.
        rules: ranks that tables may use, and tables kept together or apart; ``None``: none.
        further_tiers: names of resources beside the topology's memory tiers, which ``memory_bytes`` and
            ``capacity_bytes`` have columns for after those; a search may use them to stand for rules.
    """

    options: Options
    topology: Topology
    phases: Mapping[str, Floats]
    memory_bytes: Ints
    capacity_bytes: Ints
    objective: str = "largest_rank_time"
    rules: RankRules | None = None
    further_tiers: tuple[str, ...] = ()

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the memory tiers."""
        return (*self.topology.tiers, *self.further_tiers)

    def on_ranks(self, column: Floats | Ints, ranks: Ints) -> Floats | Ints:
        """The values of shards on their ranks: ``[N]``; of a column by class, ``[N, C]``, each of its rank's class."""
        return column if column.ndim == 1 else column[np.arange(len(ranks)), self.topology.rank_class[ranks]]

    @cached_property
    def class_ms(self) -> Floats:
        """Time that each shard of a run adds to a rank of each class, all phases together, ms: ``[S, C]``.

        Shards with a rank have the time that they take there in all columns.
        """
        fixed = np.flatnonzero(self.options.rank != FREE)
        total = np.zeros((self.options.num_shards, len(self.topology.classes)))
        for phase in self.phases.values():
            total += phase.reshape(len(phase), -1)
        total[fixed] = self.on_ranks(total[fixed], self.options.rank[fixed])[:, None]
        return total

    @cached_property
    def cost_ms(self) -> Floats:
        """Time that each shard of a run adds to its rank, the mean over ranks, ms: ``[S]``."""
        mean: Floats = self.class_ms @ (np.bincount(self.topology.rank_class) / self.topology.world_size)
        return mean

    @cached_property
    def largest_cost_ms(self) -> Floats:
        """Cost of each option's slowest shard, each on the fastest rank that it may go to: ``[O]``."""
        return np.maximum.reduceat(self.class_ms.min(axis=1), self.options.first_shard[:-1])

    @cached_property
    def total_cost_ms(self) -> Floats:
        """Cost of all shards of each option together, the mean over ranks: ``[O]``."""
        return self.total_of(self.cost_ms)

    def total_of(self, column: Floats) -> Floats:
        """A column over runs of shards ``[S]``, added up over all shards of each option: ``[O]``."""
        return np.add.reduceat(column * self.options.count, self.options.first_shard[:-1])

    @cached_property
    def largest_bytes(self) -> Ints:
        """Memory of each option's largest shard, per tier: ``[O, M]``."""
        return np.maximum.reduceat(self.memory_bytes, self.options.first_shard[:-1], axis=0)

    @cached_property
    def total_bytes(self) -> Ints:
        """Memory of all shards of each option together, per tier: ``[O, M]``."""
        total = self.memory_bytes * self.options.count[:, None]
        return np.add.reduceat(total, self.options.first_shard[:-1], axis=0)

    @cached_property
    def most_ms(self) -> float:
        """No plan takes longer: all shards of each table's slowest option on one rank, the slowest."""
        slowest = np.maximum.reduceat(
            self.total_of(self.class_ms.max(axis=1)), self.options.first_option[:-1]
        )
        return float(slowest @ self.options.multiplicity)

    @cached_property
    def fits_alone(self) -> Bools:
        """True for options of which each shard, alone, fits where it may go: ``[O]``."""
        fits = (self.memory_bytes <= self._room_bytes()).all(axis=1)
        return np.logical_and.reduceat(fits, self.options.first_shard[:-1])

    def _room_bytes(self) -> Ints:
        """Find the capacity of the smallest rank that a shard of each run may have to live on, bytes: ``[S, M]``."""
        most, least = self.capacity_bytes.max(axis=0), self.capacity_bytes.min(axis=0)
        room = np.tile(most, (len(self.memory_bytes), 1))
        if (most > least).any():
            # Shards of a run with ranks live on `count` ranks in turn: the smallest of these decides. Many runs share
            # their ranks, so each distinct pair (first rank, count) is looked at once.
            fixed = np.flatnonzero(self.options.rank != FREE)
            places = np.stack([self.options.rank[fixed], self.options.count[fixed]])
            distinct, inverse = np.unique(places, axis=1, return_inverse=True)
            smallest = [self.capacity_bytes[first : first + count].min(axis=0) for first, count in distinct.T]
            room[fixed] = np.reshape(smallest, (-1, len(most)))[inverse.reshape(-1)]
        return room


def estimate_costs(
    options: Options,
    topology: Topology,
    performance: Estimator,
    storage: Estimator,
    capacity_bytes: Ints,
    **asked: Any,
) -> SearchSpace:
    """The options with what the estimators say.

    Args:
        options: the options of all tables.
        topology: the ranks.
        performance: estimator of times.
        storage: estimator of memory.
        capacity_bytes: bytes that may be used on each rank: ``[W, M]``.
        asked: objective and rules of the search space.

    Raises:
        PlanningError: an estimator returned no mapping, columns of another length, negative numbers, or an unknown
            memory tier.
    """
    by_tier = _estimated(storage, options, topology)
    memory = np.zeros((options.num_shards, len(topology.tiers)), dtype=np.int64)
    for tier, column in by_tier.items():
        checked = _checked(f"estimator {storage.name!r}", tier, column, options, _MOST_ESTIMATED_BYTES)
        whole = np.ceil(np.minimum(checked, _MOST_BYTES)).astype(np.int64)
        # By the topology's name, or by a kernel's.
        known = tier if tier in topology.tiers else topology.tier_of(tier)
        memory[:, topology.tiers.index(known)] += whole
    if topology.is_mixed:
        _keep_on_devices(memory, options, topology)
    by_class = [_phases(performance, options, ranks) for ranks in topology.classes]
    none, phases = np.zeros(options.num_shards), by_class[0]
    if len(by_class) > 1:
        names = dict.fromkeys(name for own in by_class for name in own)
        phases = {name: np.stack([own.get(name, none) for own in by_class], axis=1) for name in names}
    return SearchSpace(options, topology, phases, memory, capacity_bytes, **asked)


def _phases(performance: Estimator, options: Options, ranks: Topology) -> dict[str, Floats]:
    """Phase -> milliseconds of each shard on ranks that all have one speed: ``[S]``."""
    phases = {
        phase: _checked(f"estimator {performance.name!r}", phase, column, options)
        for phase, column in _estimated(performance, options, ranks).items()
    }
    if ranks.replicas is not None:  # whatever the model of costs: it is asked for one sharding group
        phases[AVERAGING] = phases.get(AVERAGING, 0.0) + averaging_costs(options, ranks)[1]
    return phases


def averaging_costs(options: Options, topology: Topology) -> tuple[Floats, Floats]:
    """Bytes of each shard that are averaged with its replicas, and the milliseconds a step that this takes: ``[S]``.

    The extension ``method:averaging`` tells them. Both are 0 where there are no other sharding groups.

    Raises:
        UnknownPluginError: no plugin that tells them is loaded.
        PlanningError: the plugin told other than one finite number of 0 or more for each run of shards.
    """
    if topology.replicas is None:
        return np.zeros(options.num_shards), np.zeros(options.num_shards)
    offered, gives = process_host().extensions, tuple[np.ndarray, np.ndarray]
    averaged, ms = ask_at("method", AVERAGING, offered, gives, options, topology)
    who = f"'method:{AVERAGING}' of plugin {offered.entry(f'method:{AVERAGING}').provenance}"
    return _checked(who, "bytes", averaged, options), _checked(who, "milliseconds", ms, options)


def _keep_on_devices(memory: Ints, options: Options, topology: Topology) -> None:
    """Let each shard take some of the memory that only ranks of its device have: a byte where it takes none."""
    for device in topology.device_types:
        own = topology.tiers.index(topology.tier_of("device", device))
        mine = options.on_device(device)
        memory[mine, own] = np.maximum(memory[mine, own], 1)


def _estimated(estimator: Estimator, options: Options, topology: Topology) -> Mapping[str, Floats]:
    with (
        np.errstate(over="ignore", divide="ignore", invalid="ignore"),  # such estimates are refused in words
        calling(f"estimator {estimator.name!r}"),
    ):
        columns: object = estimator.estimate(options, topology)
    if not isinstance(columns, Mapping) or not columns or not all(isinstance(key, str) for key in columns):
        keys = "memory tier" if estimator.measures == STORAGE else "phase"
        raise PlanningError(
            f"estimator {estimator.name!r} broke its contract: estimate() returned {brief(columns)}; it must "
            f"return a mapping from each {keys} to one value for each of the {options.num_shards} runs of shards"
        )
    return columns


def _checked(who: str, what: str, column: Floats, options: Options, most: float = _MOST_ESTIMATE) -> Floats:
    try:
        values = np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.array(np.nan)
    if values.shape != (options.num_shards,):
        raise PlanningError(
            f"{who} broke its contract: {what!r} must be one number for each of the "
            f"{options.num_shards} runs of shards, it is {brief(column)}"
        )
    wrong = np.flatnonzero(~((values >= 0) & (values <= most)))
    if len(wrong):
        table = options.tables[options.shard_table[wrong[0]]]
        raise PlanningError(
            f"{who} returned {values[wrong[0]]} as {what!r} for a shard of table "
            f"{table.describe()}; estimates must be finite, from 0 to {most:g}"
        )
    return values


def vector_bytes(options: Options) -> tuple[Floats, Floats]:
    """Compute the bytes of a vector of each shard between ranks, as a result and as its gradient: ``[S]`` each.

    Kernels sum in float32, and float32 is what travels, whatever the type of the weights; or what a table's codecs make
    of it. Gradients have :func:`gradient_columns`.
    """
    widths = options.num_columns, gradient_columns(options)
    results, gradients = found = [(FLOAT_BYTES * own).astype(np.float64) for own in widths]
    by_config: dict[QCommsConfig, list[int]] = {}
    for table, spec in enumerate(options.tables):
        if spec.qcomms_config is not None:
            by_config.setdefault(spec.qcomms_config, []).append(table)
    for config, tables in by_config.items():
        mine = np.flatnonzero(np.isin(options.shard_table, tables))
        # A codec's bytes depend on the width alone: it is asked once for each width.
        for own, columns, row_bytes in zip(
            found, widths, (config.result_row_bytes, config.gradient_row_bytes), strict=True
        ):
            known, place = np.unique(columns[mine], return_inverse=True)
            own[mine] = np.array([row_bytes(width) for width in known.tolist()])[place]
    return results, gradients


def gradient_columns(options: Options) -> Ints:
    """Columns of the gradients that each shard is sent: ``[S]``; its own, or all where its kernel needs whole rows."""
    whole = options.by_request(
        lambda kernel, request: request.embedding_dim * kernel.needs_whole_rows(request)
    )
    columns: Ints = np.maximum(options.num_columns, whole.astype(np.int64))
    return columns


def traffic_bytes(options: Options, topology: Topology) -> tuple[Floats, Floats]:
    """Compute the bytes that each shard of a run receives and sends in a step: ``[S]`` each.

    Ids of all ranks' samples, with what travels beside each, come in; the vectors of all ranks' bags go out, of cut
    rows only those of bags with ids (:func:`filled_bags`); if they are added inside the host, those of all bags, and
    then also the sums for this rank's counterparts on all hosts. A copy of the whole table has its own rank's ids and
    vectors only. A shard without rows has neither, but where sums are made inside the host: all ranks of it take part
    in them, those without rows with zeros.
    """
    table = options.shard_table
    fraction = options.id_fraction
    pooled = options.is_pooled[table]
    num_batches = np.where(options.is_copy, 1, topology.world_size)
    # Ids of all ranks' batches that fall into the shard's rows.
    ids = options.ids_per_batch[table] * num_batches * fraction
    # Sums inside the host: beside the vectors of all batches, one sum for each host crosses.
    crossing = topology.num_hosts if topology.num_hosts > 1 else 0
    crosses = options.sums_inside_host[options.option] & ~options.is_copy
    num_sums = num_batches + np.where(crosses, crossing, 0)
    # A shard without rows sends nothing but the zeros that a sum over its host waits for.
    sends = (options.num_rows > 0) | (crosses & (crossing > 0))
    bags = options.bags_per_batch[table] * filled_bags(options, topology)
    vectors = np.where(pooled, bags * num_sums * sends, ids)
    input_bytes = ids * options.id_bytes
    return input_bytes, vectors * vector_bytes(options)[0]


def filled_bags(options: Options, topology: Topology) -> Floats:
    """The part of the bags that travel between a shard and the ranks: ``[S]``.

    Where rows are cut, bags without ids in the shard's rows stay at home, unless sums are made inside the host. Of bags
    of ``n`` ids, each of which falls into the shard's rows with probability ``f``, ``1 - (1 - f)^n`` have any.
    """
    table, option = options.shard_table, options.option
    is_whole = ~options.cuts_rows[option] | ~options.is_pooled[table] | options.is_copy
    if topology.num_hosts > 1:
        is_whole |= options.sums_inside_host[option]
    num_bags = options.bags_per_batch[table]
    num_ids = np.divide(
        options.ids_per_batch[table], num_bags, where=num_bags > 0, out=np.ones_like(num_bags)
    )
    # n log(1 - f), and below 1 - e^that: both keep the digits of a small f. f = 1 would be log 0.
    missed = np.log1p(-np.minimum(options.id_fraction, 1 - 1e-12)) * num_ids
    return np.where(is_whole, 1.0, -np.expm1(missed))
