"""TorchRec's estimators, and scripts' own in shardwright's planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

import shardwright as sw
from shardwright.host import host
from shardwright_torchrec.distributed.types import PipelineType
from shardwright_torchrec.planner.columns import PHASES, options_of, set_costs, values_of
from shardwright_torchrec.planner.types import ShardEstimator, ShardingOption


class _BuiltIn(ShardEstimator):
    """TorchRec's formulas, which are a plugin of shardwright: the options have its numbers already."""

    plugin: ClassVar[str]

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Mapping[str, Any] | None = None
    ) -> None:
        """Check that each shard has its costs, which it has from the enumerator.

        Raises:
            UnsupportedError: an option was not made by an enumerator.
        """
        for option in sharding_options:
            if option.index < 0:
                raise sw.UnsupportedError(
                    f"{option!r} was made by hand; {type(self).__name__} estimates options that EmbeddingEnumerator or "
                    "the planner made"
                )


class EmbeddingPerfEstimator(_BuiltIn):
    """Times by TorchRec's formulas.

    Args:
        topology: the ranks.
        constraints: constraints by table name.
        is_inference: not supported.
    """

    plugin: ClassVar[str] = "torchrec"

    def __init__(
        self,
        topology: sw.Topology,
        constraints: dict[str, sw.ParameterConstraints] | None = None,
        is_inference: bool = False,
    ) -> None:
        _refuse(is_inference=is_inference)
        self.topology, self.constraints = topology, constraints


class EmbeddingStorageEstimator(_BuiltIn):
    """Memory by TorchRec's formulas.

    Args:
        topology: the ranks.
        constraints: constraints by table name.
        pipeline_type: kind of the training loop; the formulas are those of `NONE`.
        run_embedding_at_peak_memory: not supported.
        is_inference: not supported.
    """

    plugin: ClassVar[str] = "torchrec_storage"

    def __init__(
        self,
        topology: sw.Topology,
        constraints: dict[str, sw.ParameterConstraints] | None = None,
        pipeline_type: PipelineType = PipelineType.NONE,
        run_embedding_at_peak_memory: bool = False,
        is_inference: bool = False,
    ) -> None:
        _refuse(is_inference=is_inference, run_embedding_at_peak_memory=run_embedding_at_peak_memory)
        self.topology, self.constraints, self.pipeline_type = topology, constraints, pipeline_type


def _refuse(**asked: bool) -> None:
    for name, value in asked.items():
        if value:
            raise sw.UnsupportedError(
                f"{name}=True is not supported: estimates are of training, phase by phase"
            )


class _Own(sw.Estimator):
    """Estimators that a script has written.

    Args:
        estimators: the script's, in their order; each may change what the one before has set.
    """

    depends_on_shape_only: ClassVar[bool] = False

    def __init__(self, estimators: Sequence[ShardEstimator]) -> None:
        self.estimators = estimators

    def estimated(self, options: sw.Options, topology: sw.Topology) -> list[ShardingOption]:
        """The options of the distinct tables with TorchRec's costs, and the script's instead where it sets any."""
        numbers = [int(np.argmax(options.distinct_table == table)) for table in range(len(options.tables))]
        found = [
            option for table, number in enumerate(numbers) for option in options_of(options, table, number)
        ]
        built_in = host().estimators
        set_costs(
            found,
            options,
            built_in.create(EmbeddingPerfEstimator.plugin).estimate(options, topology),
            built_in.create(EmbeddingStorageEstimator.plugin).estimate(options, topology),
        )
        for estimator in self.estimators:
            estimator.estimate(found, {})
        return found


class OwnPerformance(_Own):
    """Times of a script's estimators."""

    name: ClassVar[str] = "own_performance"

    def estimate(self, options: sw.Options, topology: sw.Topology) -> Mapping[str, npt.NDArray[np.float64]]:
        """Milliseconds of each phase, ``[S]``."""
        found = self.estimated(options, topology)
        return {
            phase: values_of(found, options, lambda shard, field=field: getattr(shard.perf, field))
            for phase, field in PHASES.items()
        }


class OwnStorage(_Own):
    """Memory of a script's estimators."""

    name: ClassVar[str] = "own_storage"
    measures: ClassVar[str] = "storage"

    def estimate(self, options: sw.Options, topology: sw.Topology) -> Mapping[str, npt.NDArray[np.float64]]:
        """Bytes of each memory tier, ``[S]``."""
        found = self.estimated(options, topology)
        return {
            tier: values_of(found, options, lambda shard, tier=tier: getattr(shard.storage, tier))
            for tier in topology.tiers
            if tier in ("hbm", "ddr")
        }
