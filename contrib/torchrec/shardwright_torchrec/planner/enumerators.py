"""`EmbeddingEnumerator`: the options of a model's tables as Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import shardwright as sw
from shardwright_torchrec.parallel.constraints import as_torchrec_reads
from shardwright_torchrec.planner.proposers import listed
from shardwright_torchrec.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    OwnPerformance,
    OwnStorage,
)
from shardwright_torchrec.planner.types import (
    Enumerator,
    PlannerErrorType,
    ShardEstimator,
    ShardingOption,
    as_planner_error,
)


class EmbeddingEnumerator(Enumerator):
    """Lists the options of a model's tables, with their costs.

    Args:
        topology: the ranks.
        batch_size: samples per rank and step.
        constraints: constraints by table name.
        estimator: estimators, TorchRec's or a script's own; TorchRec's two by default.
        use_exact_enumerate_order: not needed; the order is always the same.
    """

    def __init__(
        self,
        topology: sw.Topology,
        batch_size: int,
        constraints: dict[str, sw.ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        self.topology, self.batch_size, self.constraints = topology, batch_size, constraints
        given = [estimator] if isinstance(estimator, ShardEstimator) else list(estimator or ())
        self.estimators = given or [EmbeddingPerfEstimator(topology), EmbeddingStorageEstimator(topology)]

    def enumerate(self, module: Any, sharders: list[sw.ModuleSharder]) -> list[ShardingOption]:
        """The options of all tables of a model that the sharders shard, with their costs; none without tables.

        Raises:
            PlanningError: a table has none.
            PlannerError: no plan can fit.
        """
        if not tables_of(module, sharders):
            return []
        with as_planner_error(lambda: PlannerErrorType.INSUFFICIENT_STORAGE):
            space = search_space(
                module,
                sharders,
                topology=self.topology,
                batch_size=self.batch_size,
                constraints=as_torchrec_reads(self.constraints),
                storage_reservation=0.0,
                **estimators_of(self.estimators),
            )
        return [option for own in listed(space) for option in own]

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set costs anew by the script's own estimators."""
        for estimator in self.estimators:
            estimator.estimate(sharding_options, {})


class _Look(sw.Proposer):
    """Proposes nothing, and keeps what there is to search."""

    name: ClassVar[str] = "look"
    space: sw.SearchSpace | None = None

    def proposals(self, space: sw.SearchSpace, watch: sw.Watch) -> sw.Proposals:
        """No proposals."""
        self.space = space
        yield from ()


def search_space(module: Any, sharders: Sequence[sw.ModuleSharder], **arguments: Any) -> sw.SearchSpace:
    """The options of a model's tables, their costs and the ranks' capacities, as a planner has them.

    Args:
        module: the model.
        sharders: module sharders.
        arguments: arguments of `shardwright.EmbeddingShardingPlanner`.

    Raises:
        PlanningError: a table has no option, or no plan can fit.
    """
    look = _Look()
    try:
        sw.EmbeddingShardingPlanner(proposer=look, **arguments).plan(module, sharders)
    except sw.PlanningError:  # there is no plan, since nothing was proposed
        if look.space is None:
            raise
    assert look.space is not None  # else there was an error
    return look.space


def tables_of(module: Any, sharders: Sequence[sw.ModuleSharder]) -> list[sw.TableSpec]:
    """The tables of a model that the sharders shard."""
    return [
        table
        for child in module.modules()
        for sharder in sharders
        if isinstance(child, sharder.module_type)
        for table in sharder.tables(child)
    ]


def estimators_of(estimators: Sequence[ShardEstimator]) -> dict[str, Any]:
    """The planner's arguments `estimator` and `storage_estimator` for TorchRec's or a script's estimators.

    TorchRec's become plugins by name. A script's own are asked for time and memory, unless each derives from the one
    that estimates the other.
    """
    own = [one for one in estimators if type(one) not in (EmbeddingPerfEstimator, EmbeddingStorageEstimator)]
    of_time = [one for one in own if not isinstance(one, EmbeddingStorageEstimator)]
    of_memory = [one for one in own if not isinstance(one, EmbeddingPerfEstimator)]
    return {
        "estimator": OwnPerformance(of_time) if of_time else EmbeddingPerfEstimator.plugin,
        "storage_estimator": OwnStorage(of_memory) if of_memory else EmbeddingStorageEstimator.plugin,
    }
