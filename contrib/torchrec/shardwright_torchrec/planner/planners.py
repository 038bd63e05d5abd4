"""`EmbeddingShardingPlanner` of TorchRec's scripts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

import shardwright as sw
from shardwright_torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS
from shardwright_torchrec.parallel.constraints import as_torchrec_reads, check_precisions
from shardwright_torchrec.parallel.kernel_names import FUSED, named
from shardwright_torchrec.parallel.sharders import get_default_sharders
from shardwright_torchrec.planner import partitioners, proposers
from shardwright_torchrec.planner.enumerators import EmbeddingEnumerator, estimators_of, tables_of
from shardwright_torchrec.planner.stats import NoopPerfModel
from shardwright_torchrec.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanDebugStats,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Stats,
    as_planner_error,
)


class EmbeddingShardingPlanner(sw.EmbeddingShardingPlanner):
    """The planner of a model's tables, as TorchRec's scripts call it.

    Args:
        topology: ranks and devices; the enumerator's by default; else `collective_plan` derives it.
        batch_size: samples per rank and step; the enumerator's by default.
        enumerator: an `EmbeddingEnumerator`, whose estimators, constraints and topology are taken.
        storage_reservation: device memory kept free.
        proposer: TorchRec's proposers, a script's own, or what shardwright takes; one or several.
        partitioner: TorchRec's partitioners, a script's own, or what shardwright takes.
        performance_model: `NoopPerfModel`, which rates plans as shardwright does.
        stats: reporters of each plan, instead of the printed report.
        constraints: table name -> constraints of the table.
        debug: print the report of each plan, unless `stats` are given.
        callbacks: not supported.
        timeout_seconds: limit of the search, s.
        plan_loader: not supported.
        further: further arguments of `shardwright.EmbeddingShardingPlanner`.

    Raises:
        UnsupportedError: something is not supported; the text names it.
    """

    def __init__(
        self,
        topology: sw.Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: sw.StorageReservation | float | None = None,
        proposer: Any = None,
        partitioner: Any = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, sw.ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: Any = None,
        **further: Any,
    ) -> None:
        _refuse(performance_model, callbacks, plan_loader)
        listing = _known(enumerator)
        if listing is not None:
            topology, batch_size = topology or listing.topology, batch_size or listing.batch_size
            constraints = listing.constraints if constraints is None else constraints
            further = {**estimators_of(listing.estimators), **further}
        rules = (constraints or {}).values()
        self._asked = {name for rule in rules for name in rule.compute_kernels or () if name != FUSED}
        self._stats = [stats] if isinstance(stats, Stats) else list(stats or ())
        given = further.get("refinements", ["scale_up_caches"] if _scales(proposer) else [])
        super().__init__(
            topology,
            batch_size,
            constraints=as_torchrec_reads(constraints),
            debug=debug and stats is None,
            storage_reservation=storage_reservation,
            proposer=_proposers(_without_scaling(proposer)),
            partitioner=_plugin(partitioner, Partitioner, partitioners.OwnPartitioner),
            seconds=timeout_seconds,
            **{
                "estimator": "torchrec",
                **further,
                "refinements": [
                    *([given] if isinstance(given, str) or callable(given) else given),
                    _without_rules_for_no_table,
                ],
            },
        )
        self._told: dict[str, Any] = {
            "topology": topology,
            "batch_size": batch_size,
            "storage_reservation": storage_reservation,
            "constraints": constraints,
            "debug": debug,
            "debug_stats": PlanDebugStats(type(self).__name__, timeout_seconds),
        }

    def plan(self, module: Any, sharders: Sequence[Any]) -> sw.ShardingPlan:
        """Plan all tables of `module` that `sharders` can shard; nothing without such tables.

        Raises:
            PlannerError: there is no plan.
        """
        if not self._tables(module, sharders):
            return sw.ShardingPlan({})
        with as_planner_error(lambda: self._why(module, sharders)):
            return self._reported(super().plan(module, sharders), module, sharders)

    def collective_plan(
        self, module: Any, sharders: Sequence[Any] | None = None, pg: Any = None, **further: Any
    ) -> sw.ShardingPlan:
        """Plan on rank 0 and give every rank the same plan; TorchRec's two sharders by default.

        Raises:
            PlannerError: there is no plan.
        """
        sharders = get_default_sharders() if sharders is None else sharders
        if not self._tables(module, sharders):
            return sw.ShardingPlan({})
        with as_planner_error(lambda: self._why(module, sharders)):
            plan = super().collective_plan(module, sharders, pg, **further)
            return self._reported(plan, module, sharders)

    def _tables(self, module: Any, sharders: Sequence[Any]) -> list[sw.TableSpec]:
        """The tables to plan, whose constraints are checked."""
        tables = tables_of(module, sharders)
        check_precisions(self._told["constraints"], tables)
        return tables

    def _why(self, module: Any, sharders: Sequence[Any]) -> PlannerErrorType:
        """The reason why there is no plan: the tables' weights alone are too much for all ranks, or anything else."""
        topology = self._told["topology"]
        weights = sum(_weight_bytes(table) for table in tables_of(module, sharders))
        if topology is not None and weights > int(topology.capacity_bytes.sum()):
            return PlannerErrorType.INSUFFICIENT_STORAGE
        return PlannerErrorType.STRICT_CONSTRAINTS

    def _reported(self, plan: sw.ShardingPlan, module: Any, sharders: Sequence[Any]) -> sw.ShardingPlan:
        """The plan under TorchRec's names of kernels, told to the script's reporters on the rank that made it."""
        told = named(plan, self._asked | _asked_by(sharders, module, plan))
        if not self._stats or self.report is None:
            return told
        space, result = self.report.space, self.report.result
        best = _chosen(space, plan)
        for stats in self._stats:
            stats.log(
                sharding_plan=told,
                num_proposals=result.num_proposals,
                num_plans=result.num_placed,
                run_time=self.report.seconds,
                best_plan=best,
                sharders=list(sharders),
                **{**self._told, "topology": space.topology},
            )
        return told


def _without_rules_for_no_table(search: Any, request: Any, watch: Any) -> Any:
    """Search without the rules for tables that are not there, with a warning for each, as TorchRec goes on without."""
    while True:
        try:
            return search(request, watch)
        except sw.UnknownNameError as error:
            rules = dict(request.constraints.rules)
            if rules.pop(error.subject, None) is None:
                raise
            warnings.warn(f"{error} It is left out.", RuntimeWarning, stacklevel=2)
            request = attrs.evolve(request, constraints=attrs.evolve(request.constraints, rules=rules))


def _weight_bytes(table: sw.TableSpec) -> int:
    bits = DATA_TYPE_NUM_BITS.get(table.data_type, 32)
    return table.num_embeddings * -(-table.embedding_dim * bits // 8)


def _asked_by(sharders: Sequence[Any], module: Any, plan: sw.ShardingPlan) -> set[str]:
    """Names of compute kernels that a script's sharders ask for, where they do not ask for `fused`."""
    devices = {sharding.device_on(0) for own in plan.plan.values() for sharding in own.values()}
    allowed = [
        kernels
        for sharder in sharders
        for table in tables_of(module, [sharder])
        for device in devices
        for kernels in (sharder.allowed(table, device) or {}).values()
    ]
    return {name for kernels in allowed if kernels and FUSED not in kernels for name in kernels}


def _chosen(space: sw.SearchSpace, plan: sw.ShardingPlan) -> list[ShardingOption]:
    """The options that a plan took, with the ranks of their shards."""
    best = []
    for own in proposers.listed(space, every=True):
        sharding = plan.plan[own[0].path][own[0].name]
        option = next(option for option in own if _is_taken(option, sharding))
        for shard, rank in zip(option.shards, sharding.ranks, strict=True):
            shard.rank = rank
        best.append(option)
    return best


def _is_taken(option: ShardingOption, sharding: sw.ParameterSharding) -> bool:
    names = (sharding.sharding_type, sharding.compute_kernel)
    cuts = [[block.num_rows, block.num_columns] for block in sharding.layout.blocks]
    return (option.sharding_type, option.own_kernel) == names and [
        shard.size for shard in option.shards
    ] == cuts


def _refuse(model: PerfModel | None, callbacks: Any, plan_loader: Any) -> None:
    if model is not None and type(model) is not NoopPerfModel:
        raise sw.UnsupportedError(
            f"performance_model={type(model).__name__}: plans are rated by their slowest rank, as NoopPerfModel "
            "does. shardwright.EmbeddingShardingPlanner(objective=...) has other ratings"
        )
    for name, value in (("callbacks", callbacks), ("plan_loader", plan_loader)):
        if value is not None:
            raise sw.UnsupportedError(
                f"{name} is not supported: change the plan that plan() returns, and give it on"
            )


def _known(enumerator: Enumerator | None) -> EmbeddingEnumerator | None:
    """The enumerator, if its options are shardwright's."""
    if enumerator is None:
        return None
    if not isinstance(enumerator, EmbeddingEnumerator) or (
        type(enumerator).enumerate is not EmbeddingEnumerator.enumerate
    ):
        raise sw.UnsupportedError(
            f"enumerator={type(enumerator).__name__}: options are sharding types times compute kernels. To offer "
            "others write a shardwright.ShardingType; to offer fewer give ParameterConstraints"
        )
    return enumerator


def _scales(asked: Any) -> bool:
    """True if caches are to be scaled up."""
    given = asked if isinstance(asked, list | tuple) else [asked]
    return any(isinstance(one, proposers.EmbeddingOffloadScaleupProposer) for one in given)


def _without_scaling(asked: Any) -> Any:
    """The proposers beside the one that scales caches up; `None` without one, for the planner's own."""
    if not _scales(asked):
        return asked
    given = asked if isinstance(asked, list | tuple) else [asked]
    return [one for one in given if not _scales(one)] or None


def _proposers(asked: Any) -> Any:
    """Proposers of shardwright for TorchRec's, or for a script's own."""
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        return [_proposers(one) for one in asked]
    return _plugin(asked, Proposer, proposers.OwnProposer)


def _plugin(asked: Any, interface: type, wrapper: Callable[[Any], Any]) -> Any:
    """The name of the plugin that TorchRec's class stands for, or a script's object in its wrapper."""
    if not isinstance(asked, interface):
        return asked
    return vars(type(asked)).get("plugin") or wrapper(asked)
