"""Metrics of the order of predictions, over the last samples.

Samples of equal predictions count as one step of the curve, so that a value doesn't depend on their order.
Legend: T tasks, N samples; areas as in Fawcett 2006, "An introduction to ROC analysis".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwright_torchrec.metrics.rec_metric import (
    LIFETIME,
    WINDOW,
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
    RecMetricException,
)

__all__ = ["AUCMetric", "AUPRCMetric", "area_under_precision_recall", "area_under_roc"]

COLUMNS = 3
"""Numbers of a sample in the window: prediction, label and weight."""
POSITIVE_SHARE = 0.039
"""Least soft label that counts as positive with `apply_bin`; TorchRec's number."""


def _steps(predictions: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of true and false positives at each distinct prediction, from the largest on."""
    order = predictions.argsort(descending=True)
    true, false = (weights[order] * side for side in (labels[order], 1 - labels[order]))
    ordered = predictions[order]
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]  # of a run of equal predictions
    return true.cumsum(0)[is_last], false.cumsum(0)[is_last]


def area_under_roc(predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Area under the curve of true over false positives; 0.5 where all labels are the same.

    Args:
        predictions: ``[N]``.
        labels: ``[N]``, 0 to 1.
        weights: ``[N]``.
    """
    true, false = _steps(predictions, labels, weights)
    if not len(true) or true[-1] * false[-1] == 0:
        return predictions.new_tensor(0.5)
    origin = true.new_zeros(1)
    area = torch.trapezoid(torch.cat([origin, true]), torch.cat([origin, false]))
    return area / (true[-1] * false[-1])


def area_under_precision_recall(predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Average precision: each step of recall times the precision there; 0 without a positive label.

    Args:
        predictions: ``[N]``.
        labels: ``[N]``, 0 to 1.
        weights: ``[N]``.
    """
    true, false = _steps(predictions, labels, weights)
    if not len(true) or true[-1] == 0:
        return predictions.new_tensor(0.0)
    steps = torch.diff(true, prepend=true.new_zeros(1)) / true[-1]
    precision = (true / (true + false)).nan_to_num(1.0)  # 1 before the first weight, as TorchRec has it
    return (steps * precision).sum()


class RankedComputation(RecMetricComputation):
    """An area over the window's samples of all ranks, which are gathered to compute it."""

    area: ClassVar[Callable[[Tensor, Tensor, Tensor], Tensor]]
    metric_name: ClassVar[str]
    prefixes: ClassVar[tuple[str, ...]] = (WINDOW,)

    def __init__(self, *args: Any, grouped: bool = False, apply_bin: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._apply_bin = apply_bin
        self.required_inputs = ("grouping_keys",) if grouped else ()
        # One list of rows [N, columns]: torchmetrics gathers it once, ranks may have different numbers of samples.
        self.add_state("samples", default=[], dist_reduce_fx="cat")
        self._begin()

    def _begin(self) -> None:
        columns = COLUMNS * self._n_tasks + len(self.required_inputs)
        self.samples = [torch.zeros(0, columns, dtype=torch.float64, device=self.device)]

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        self._begin()

    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Add a batch to the window, and take out the samples that it has no room for."""
        if predictions is None or weights is None or any(name not in kwargs for name in self.required_inputs):
            needed = ", ".join(("predictions", "weights", *self.required_inputs))
            raise RecMetricException(f"{type(self).__name__} needs {needed}")
        if self._apply_bin:
            labels = labels >= POSITIVE_SHARE
        further = [kwargs[name].reshape(1, -1) for name in self.required_inputs]
        rows = torch.cat([value.double() for value in (predictions, labels, weights, *further)]).T
        self.samples = [torch.cat([*self.samples, rows])[-self._window_size :]]

    def _compute(self) -> list[MetricComputationReport]:
        samples = self.samples if isinstance(self.samples, Tensor) else torch.cat(self.samples)
        columns = samples.T
        tasks = columns[: COLUMNS * self._n_tasks].reshape(COLUMNS, self._n_tasks, -1).unbind(1)
        area = type(self).area
        value = torch.stack([area(*task) for task in tasks])
        # The window's values are float32, the lifetime's float64, as TorchRec's are.
        reports = [
            MetricComputationReport(self.metric_name, prefix, value.float() if prefix == WINDOW else value)
            for prefix in self.prefixes
        ]
        if self.required_inputs:
            grouped = torch.stack([self._of_groups(task, columns[-1]) for task in tasks])
            reports.append(MetricComputationReport(f"grouped_{self.metric_name}", WINDOW, grouped.float()))
        return reports

    def _of_groups(self, task: Tensor, keys: Tensor) -> Tensor:
        """Mean of the areas of groups of a task's samples ``[3, N]``; the area of none without samples."""
        area = type(self).area
        if not len(keys):
            return area(*task)
        return torch.stack([area(*task[:, keys == key]) for key in keys.unique()]).mean()


class AUCMetricComputation(RankedComputation):
    """Area under the ROC curve; with `grouped_auc`, the mean of the groups that `grouping_keys` tells too."""

    area, metric_name = staticmethod(area_under_roc), "auc"

    def __init__(self, *args: Any, grouped_auc: bool = False, apply_bin: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped=grouped_auc, apply_bin=apply_bin, **kwargs)


class AUPRCMetricComputation(RankedComputation):
    """Area under precision over recall; TorchRec reports the window's under both prefixes."""

    area, metric_name = staticmethod(area_under_precision_recall), "auprc"
    prefixes = (WINDOW, LIFETIME)

    def __init__(self, *args: Any, grouped_auprc: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped=grouped_auprc, **kwargs)


class AUCMetric(RecMetric):
    """Area under the ROC curve."""

    _namespace, _computation_class = "auc", AUCMetricComputation


class AUPRCMetric(RecMetric):
    """Area under precision over recall."""

    _namespace, _computation_class = "auprc", AUPRCMetricComputation
