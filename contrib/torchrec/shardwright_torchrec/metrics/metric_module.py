"""Metrics of a training job in one module, which takes the model's output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import shardwright as sw
from shardwright_torchrec.metrics.config import (
    BatchSizeStage,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecMetricEnumBase,
    RecTaskInfo,
    StateMetricEnum,
)
from shardwright_torchrec.metrics.model_utils import parse_task_model_outputs
from shardwright_torchrec.metrics.ranked import AUCMetric, AUPRCMetric
from shardwright_torchrec.metrics.rec_metric import RecMetric, RecMetricList
from shardwright_torchrec.metrics.sums import (
    AccuracyMetric,
    AverageMetric,
    CalibrationMetric,
    CTRMetric,
    MAEMetric,
    MSEMetric,
    NEMetric,
    NEPositiveMetric,
    NMSEMetric,
    NumPositiveSamplesMetric,
    PrecisionMetric,
    RecalibratedCalibrationMetric,
    RecalibratedNEMetric,
    RecallMetric,
    SumWeightsMetric,
    UnweightedNEMetric,
    WeightedAvgMetric,
    WeightedSumPredictionsMetric,
)
from shardwright_torchrec.metrics.throughput import ThroughputMetric

__all__ = [
    "REC_METRICS_MAPPING",
    "DeferrableMetrics",
    "MetricValue",
    "RecMetricModule",
    "StateMetric",
    "ThroughputMetric",
    "generate_metric_module",
]

MetricValue = Tensor | float
"""A number that a source gives."""

_METRICS = (
    *(AccuracyMetric, AUCMetric, AUPRCMetric, AverageMetric, CTRMetric, CalibrationMetric, MAEMetric),
    *(MSEMetric, NEMetric, NEPositiveMetric, NMSEMetric, NumPositiveSamplesMetric, PrecisionMetric),
    *(RecalibratedCalibrationMetric, RecalibratedNEMetric, RecallMetric, SumWeightsMetric),
    *(UnweightedNEMetric, WeightedAvgMetric, WeightedSumPredictionsMetric),
)
REC_METRICS_MAPPING: dict[RecMetricEnumBase, type[RecMetric]] = {
    RecMetricEnum(metric._namespace): metric for metric in _METRICS
}
"""Names of metrics -> their classes; a script may put its own in."""


class DeferrableMetrics(dict[str, Any]):
    """Values by name, which are there already; scripts for TorchRec 1.8 ask for them by `resolve()`."""

    def resolve(self) -> dict[str, Any]:
        """The values."""
        return self

    def is_resolved(self) -> bool:
        """True: there is nothing to wait for."""
        return True

    def subscribe(
        self, callback: Callable[[dict[str, Any]], None], on_error: Callable[[Exception], None] | None = None
    ) -> None:
        """Call a function of the values, at once."""
        callback(self)


class StateMetric(ABC):
    """A source of numbers beside the metrics of predictions: an optimizer's learning rate, for example."""

    @abstractmethod
    def get_metrics(self) -> dict[str, Tensor | float]:
        """Numbers by name."""


class RecMetricModule(torch.nn.Module):
    """Metrics of predictions, throughput, and other numbers.

    Args:
        batch_size: samples of a batch on this rank.
        world_size: number of ranks.
        rec_tasks: the tasks.
        rec_metrics: the metrics.
        throughput_metric: samples per second.
        state_metrics: other numbers by name.
        compute_interval_steps: steps after which `should_compute()` is true again.
        min_compute_interval: must be 0: intervals are counted in steps.
        max_compute_interval: must be infinite.

    Raises:
        UnsupportedError: intervals are given in seconds.
    """

    def __init__(
        self,
        batch_size: int,
        world_size: int,
        rec_tasks: Sequence[RecTaskInfo] | None = None,
        rec_metrics: RecMetricList | None = None,
        throughput_metric: ThroughputMetric | None = None,
        state_metrics: Mapping[str, StateMetric] | None = None,
        compute_interval_steps: int = 100,
        min_compute_interval: float = 0.0,
        max_compute_interval: float = float("inf"),
    ) -> None:
        super().__init__()
        if min_compute_interval > 0 or max_compute_interval != float("inf"):
            raise sw.UnsupportedError(
                f"intervals of {min_compute_interval} to {max_compute_interval} s between computations: ranks would "
                "have to agree on a clock; give compute_interval_steps, got "
                f"{compute_interval_steps}"
            )
        self.batch_size, self.world_size = batch_size, world_size
        self.rec_tasks = list(rec_tasks or ())
        self.rec_metrics = rec_metrics if rec_metrics is not None else RecMetricList([])
        self.throughput_metric = throughput_metric
        self.state_metrics = dict(state_metrics or {})
        self.compute_interval_steps, self.trained_batches = compute_interval_steps, 0

    def update(self, model_out: Mapping[str, Tensor], **kwargs: Any) -> None:
        """Count a batch.

        Args:
            model_out: labels, predictions and weights ``[N]`` under the names that the tasks say.
            kwargs: further inputs of metrics.

        Raises:
            InvalidInputError: a task's tensor is missing, or sizes differ.
        """
        with torch.no_grad():
            self._update_rec_metrics(model_out, **kwargs)
            if self.throughput_metric is not None:
                self.throughput_metric.update()
            self.trained_batches += 1

    def _update_rec_metrics(self, model_out: Mapping[str, Tensor], **kwargs: Any) -> None:
        if not len(self.rec_metrics):
            return
        labels, predictions, weights, needed = parse_task_model_outputs(
            self.rec_tasks, model_out, self.get_required_inputs()
        )
        self.rec_metrics.update(
            predictions=predictions, labels=labels, weights=weights, required_inputs=needed, **kwargs
        )

    def should_compute(self) -> bool:
        """True after each `compute_interval_steps` steps."""
        return self.trained_batches % self.compute_interval_steps == 0

    def compute(self) -> DeferrableMetrics:
        """Values of all ranks by name, of metrics on rank 0 unless told otherwise; every rank makes this call."""
        return DeferrableMetrics({**self.rec_metrics.compute(), **self._others()})

    def local_compute(self) -> DeferrableMetrics:
        """Values of this rank's samples by name, of metrics of predictions alone."""
        return DeferrableMetrics(self.rec_metrics.local_compute())

    def _others(self) -> dict[str, Any]:
        values: dict[str, Any] = {} if self.throughput_metric is None else self.throughput_metric.compute()
        for name, source in self.state_metrics.items():
            values |= {f"{name}-{name}|{key}": value for key, value in source.get_metrics().items()}
        return values

    def sync(self) -> None:
        """Put all ranks' sums into the states, for a checkpoint; every rank makes this call."""
        self.rec_metrics.sync()

    def unsync(self) -> None:
        """Put this rank's own sums back."""
        self.rec_metrics.unsync()

    def reset(self) -> None:
        """Begin anew."""
        self.rec_metrics.reset()

    def get_required_inputs(self) -> list[str] | None:
        """Names of tensors that updates need beside those of tasks."""
        return self.rec_metrics.get_required_inputs()

    def shutdown(self) -> None:
        """Do nothing: no thread or process belongs to the module."""


def _metric(
    name: RecMetricEnumBase, definition: RecMetricDef, config: MetricsConfig, **common: Any
) -> RecMetric:
    """One metric of a configuration."""
    if name not in REC_METRICS_MAPPING:
        raise sw.UnsupportedError(
            f"no metric {str(name)!r} here. Known: {', '.join(sorted(map(str, REC_METRICS_MAPPING)))}. Put "
            "a class of your own into REC_METRICS_MAPPING"
        )
    chosen = [config.rec_tasks[index] for index in definition.rec_task_indices]
    return REC_METRICS_MAPPING[name](
        tasks=definition.rec_tasks or chosen,
        window_size=definition.window_size,
        compute_mode=config.rec_compute_mode,
        compute_on_all_ranks=config.compute_on_all_ranks,
        should_validate_update=config.should_validate_update,
        **common,
        **(definition.arguments or {}),
    )


def generate_metric_module(
    metric_class: type[RecMetricModule],
    metrics_config: MetricsConfig,
    batch_size: int,
    world_size: int,
    my_rank: int,
    state_metrics_mapping: Mapping[StateMetricEnum, StateMetric],
    device: torch.device,
    process_group: Any = None,
    batch_size_stages: Sequence[BatchSizeStage] | None = None,
    module_kwargs: Mapping[str, Any] | None = None,
) -> RecMetricModule:
    """Make the module that a configuration describes.

    Args:
        metric_class: class of the module.
        metrics_config: the configuration.
        batch_size: samples of a batch on this rank.
        world_size: number of ranks.
        my_rank: number of this rank.
        state_metrics_mapping: sources of other numbers, by the names that the configuration chooses.
        device: device of the states.
        process_group: ranks whose states are added; all by default.
        batch_size_stages: batch sizes that follow each other, for the throughput.
        module_kwargs: further arguments of the class.

    Raises:
        UnsupportedError: a metric is not here.
    """
    common = {
        "world_size": world_size,
        "my_rank": my_rank,
        "batch_size": batch_size,
        "process_group": process_group,
    }
    metrics = [
        _metric(name, definition, metrics_config, **common)
        for name, definition in metrics_config.rec_metrics.items()
    ]
    throughput = metrics_config.throughput_metric and ThroughputMetric(
        batch_size=batch_size,
        world_size=world_size,
        window_seconds=metrics_config.throughput_metric.window_size,
        warmup_steps=metrics_config.throughput_metric.warmup_steps,
        batch_size_stages=batch_size_stages,
    )
    module = metric_class(
        batch_size=batch_size,
        world_size=world_size,
        rec_tasks=metrics_config.rec_tasks,
        rec_metrics=RecMetricList(metrics),
        throughput_metric=throughput or None,
        state_metrics={str(name): state_metrics_mapping[name] for name in metrics_config.state_metrics},
        compute_interval_steps=metrics_config.compute_interval_steps,
        min_compute_interval=metrics_config.min_compute_interval,
        max_compute_interval=metrics_config.max_compute_interval,
        **(module_kwargs or {}),
    )
    return module.to(device)
