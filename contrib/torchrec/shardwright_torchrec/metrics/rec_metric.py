"""Bases of metrics: states over a window and a lifetime, one computation a task or one of all, and lists of metrics.

Legend: T tasks of a computation, N samples of a batch.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.exceptions import TorchMetricsUserError

import shardwright as sw
from shardwright_torchrec.metrics.config import RecComputeMode, RecTaskInfo

__all__ = [
    "LIFETIME",
    "WINDOW",
    "MetricComputationReport",
    "RecMetric",
    "RecMetricComputation",
    "RecMetricException",
    "RecMetricList",
]

LIFETIME, WINDOW = "lifetime_", "window_"


class RecMetricException(sw.InvalidInputError):
    """Samples or a configuration that no value follows from."""


class MetricComputationReport(NamedTuple):
    """A computed value: name, prefix (`lifetime_`, `window_` or none), and one number a task ``[T]``."""

    name: Any
    metric_prefix: Any
    value: Tensor
    description: str | None = None


class RecMetricComputation(Metric, ABC):
    """States and values of a metric for some tasks; torchmetrics adds up the states of all ranks.

    A subclass adds states in `__init__`, brings them forward in `update`, and makes reports of them in `_compute`.

    Args:
        my_rank: number of this rank.
        batch_size: samples of a batch on this rank.
        n_tasks: number of tasks.
        window_size: samples of this rank's window.
        compute_on_all_ranks: report on all ranks; else on rank 0.
        should_validate_update: skip batches without a weight above 0.
        compute_mode: not needed.
        process_group: ranks whose states are added; all by default.
        fused_update_limit: not needed: updates are made at once.
        allow_missing_label_with_zero_weight: not needed: a sample of weight 0 adds nothing.
    """

    def __init__(
        self,
        my_rank: int,
        batch_size: int,
        n_tasks: int,
        window_size: int,
        compute_on_all_ranks: bool = False,
        should_validate_update: bool = False,
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        process_group: Any = None,
        fused_update_limit: int = 0,
        allow_missing_label_with_zero_weight: bool = False,
    ) -> None:
        super().__init__(process_group=process_group)
        self._my_rank, self._n_tasks, self._window_size = my_rank, n_tasks, window_size
        self._reports = compute_on_all_ranks or my_rank == 0
        self._should_validate_update = should_validate_update
        self._batches: dict[str, deque[tuple[int, Tensor]]] = {}

    @staticmethod
    def get_window_state_name(state_name: str) -> str:
        """Name of a state's sum over the window."""
        return f"{WINDOW}{state_name}"

    def get_window_state(self, state_name: str) -> Tensor:
        """A state's sum over the window ``[T]``."""
        return getattr(self, self.get_window_state_name(state_name))

    def _add_state(self, name: str, default: Any, add_window_state: bool, **kwargs: Any) -> None:
        """Add a state and, if asked for, its sum over the window, which checkpoints leave out."""
        self.add_state(name, default=default, **kwargs)
        if add_window_state:
            self.add_state(
                self.get_window_state_name(name), default=default.clone(), **{**kwargs, "persistent": False}
            )
            self._batches[name] = deque()

    def _aggregate_window_state(self, state_name: str, state: Tensor, num_samples: int) -> None:
        """Add a batch's part ``[T]`` to the window, and take out the oldest batches that it has no room for."""
        batches, total = self._batches[state_name], self.get_window_state(state_name)
        batches.append((num_samples, state))
        total += state
        while len(batches) > 1 and sum(count for count, _ in batches) > self._window_size:
            total -= batches.popleft()[1]

    @abstractmethod
    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Bring the states forward by a batch, ``[T, N]`` each."""

    @abstractmethod
    def _compute(self) -> list[MetricComputationReport]:
        """Values of the states as they are."""

    def compute(self) -> list[MetricComputationReport]:
        """Values of all ranks' states, on ranks that report; every rank makes this call."""
        return self._compute() if self._reports else []

    def local_compute(self) -> list[MetricComputationReport]:
        """Values of this rank's states."""
        return self._compute()

    def kept_tensors(self) -> Iterator[Tensor]:
        """States, and the batches of windows."""
        for state in self.metric_state.values():
            yield from [state] if isinstance(state, Tensor) else state
        for batches in self._batches.values():
            yield from (state for _, state in batches)

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        for batches in self._batches.values():
            batches.clear()


class RecMetric(torch.nn.Module, ABC):
    """A metric of several tasks.

    Args:
        world_size: number of ranks.
        my_rank: number of this rank.
        batch_size: samples of a batch on this rank.
        tasks: the tasks.
        compute_mode: one computation a task, or one of all tasks.
        window_size: samples of the window, of all ranks.
        fused_update_limit: not needed: updates are made at once.
        compute_on_all_ranks: report on all ranks; else on rank 0.
        should_validate_update: skip batches without a weight above 0.
        process_group: ranks whose states are added; all by default.
        kwargs: further arguments of the computation.

    Raises:
        InvalidInputError: the window is smaller than a batch, or there is no task.
    """

    _namespace: ClassVar[Any]
    _computation_class: ClassVar[type[RecMetricComputation]]

    def __init__(
        self,
        world_size: int,
        my_rank: int,
        batch_size: int,
        tasks: Sequence[RecTaskInfo],
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        window_size: int = 100,
        fused_update_limit: int = 0,
        compute_on_all_ranks: bool = False,
        should_validate_update: bool = False,
        process_group: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        own_window = math.ceil(window_size / world_size)
        if own_window < batch_size or not tasks:
            raise RecMetricException(
                f"{type(self).__name__} needs tasks, got {len(tasks)}, and a window of a batch at least: {window_size} "
                f"samples of {world_size} ranks are {own_window} a rank, whose batches have {batch_size}"
            )
        self._tasks, self._validates = list(tasks), should_validate_update
        self._is_apart = compute_mode is RecComputeMode.UNFUSED_TASKS_COMPUTATION
        self._groups = [[task] for task in tasks] if self._is_apart else [list(tasks)]
        self._metrics_computations = torch.nn.ModuleList(
            self._computation_class(
                my_rank,
                batch_size,
                len(group),
                own_window,
                compute_on_all_ranks,
                should_validate_update,
                process_group=process_group,
                **kwargs,
            )
            for group in self._groups
        )

    def get_required_inputs(self) -> set[str]:
        """Names of tensors that an update needs beside those of tasks."""
        return set().union(*(getattr(own, "required_inputs", ()) for own in self._metrics_computations))

    def update(self, *, predictions: Any, labels: Any, weights: Any, **kwargs: Any) -> None:
        """Count a batch.

        Args:
            predictions: tensor by task ``[N]``, or one ``[tasks, N]``.
            labels: of the same form.
            weights: of the same form; `None`: 1 each.
            kwargs: further inputs, or a dict of them as `required_inputs`.
        """
        further = {**kwargs.pop("required_inputs", {}), **kwargs}
        for group, computation in zip(self._groups, self._metrics_computations, strict=True):
            given = [self._of(group, values) for values in (predictions, labels, weights)]
            if any(value is None for value in given[:2]):
                continue  # a batch that has no samples of the task
            if given[2] is None:
                given[2] = torch.ones_like(given[1], dtype=torch.float32)
            if self._validates and not (given[2] > 0).any():
                continue
            names = ("predictions", "labels", "weights")
            computation.update(**dict(zip(names, given, strict=True)), **further)

    def _of(self, group: Sequence[RecTaskInfo], values: Any) -> Tensor | None:
        """Samples of some tasks ``[T, N]``."""
        if values is None:
            return None
        if isinstance(values, Mapping):
            rows = [values.get(task.name) for task in group]
            if all(row is None for row in rows):
                return None
            if any(row is None for row in rows):
                missing = [task.name for task in group if values.get(task.name) is None]
                raise RecMetricException(f"tasks computed together need samples of each, none of {missing}")
            return torch.stack([row.reshape(-1) for row in rows])
        rows = values.reshape(len(self._tasks), -1)
        return rows if len(group) == len(self._tasks) else rows[self._tasks.index(group[0])][None]

    def compute(self) -> dict[str, Tensor]:
        """Values of all ranks' samples by name, `"ne-task|window_ne"`; empty on ranks that don't report."""
        return dict(self._named("compute"))

    def local_compute(self) -> dict[str, Tensor]:
        """Values of this rank's samples by name, `"ne-task|local_window_ne"`."""
        return dict(self._named("local_compute", "local_"))

    def _named(self, how: str, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        for group, computation in zip(self._groups, self._metrics_computations, strict=True):
            for report in getattr(computation, how)():
                # One number ``[1]`` where tasks are apart, as TorchRec's are; else one without dimensions.
                values = report.value.reshape(-1, 1) if self._is_apart else report.value.reshape(-1)
                for task, value in zip(group, values, strict=True):
                    name = f"{prefix}{report.metric_prefix}{report.name}{report.description or ''}"
                    yield f"{self._namespace}-{task.name}|{name}", value

    def get_memory_usage(self) -> dict[Tensor, int]:
        """Bytes of each tensor that the states and windows keep on this rank."""
        kept = [tensor for own in self._metrics_computations for tensor in own.kept_tensors()]
        return {tensor: tensor.nbytes for tensor in kept}

    def sync(self) -> None:
        """Put all ranks' sums into the states, for a checkpoint; every rank makes this call."""
        for computation in self._metrics_computations:
            computation.sync()

    def unsync(self) -> None:
        """Put this rank's own sums back."""
        for computation in self._metrics_computations:
            with contextlib.suppress(TorchMetricsUserError):  # there was nothing to put back
                computation.unsync()

    def reset(self) -> None:
        """Begin anew."""
        for computation in self._metrics_computations:
            computation.reset()


class RecMetricList(torch.nn.Module):
    """Several metrics as one.

    Args:
        rec_metrics: the metrics.
    """

    def __init__(self, rec_metrics: Sequence[RecMetric]) -> None:
        super().__init__()
        self.rec_metrics = torch.nn.ModuleList(rec_metrics)

    def __len__(self) -> int:
        return len(self.rec_metrics)

    def __getitem__(self, index: int) -> RecMetric:
        return self.rec_metrics[index]

    def get_required_inputs(self) -> list[str] | None:
        """Names of tensors that an update needs beside those of tasks; `None` if there are none."""
        return sorted(set().union(*(metric.get_required_inputs() for metric in self.rec_metrics))) or None

    def update(self, *, predictions: Any, labels: Any, weights: Any, **kwargs: Any) -> None:
        """Count a batch in all metrics."""
        for metric in self.rec_metrics:
            metric.update(predictions=predictions, labels=labels, weights=weights, **dict(kwargs))

    def compute(self) -> dict[str, Tensor]:
        """Values of all ranks' samples by name."""
        return {name: value for metric in self.rec_metrics for name, value in metric.compute().items()}

    def local_compute(self) -> dict[str, Tensor]:
        """Values of this rank's samples by name."""
        return {name: value for metric in self.rec_metrics for name, value in metric.local_compute().items()}

    def sync(self) -> None:
        """Put all ranks' sums into the states."""
        for metric in self.rec_metrics:
            metric.sync()

    def unsync(self) -> None:
        """Put this rank's own sums back."""
        for metric in self.rec_metrics:
            metric.unsync()

    def reset(self) -> None:
        """Begin anew."""
        for metric in self.rec_metrics:
            metric.reset()
