"""Metrics of predictions over a lifetime and a window, whose sums torchmetrics adds up over the ranks.

Legend: T tasks, N samples of a batch; p prediction, y label, w weight of a sample. Sums are float64 ``[T]``.
Normalized entropy: He and others 2014, "Practical lessons from predicting clicks on ads at Facebook". Areas under the
ROC curve: Fawcett 2006, "An introduction to ROC analysis"; equal predictions are one step of the curve.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torchmetrics import Metric

EPSILON = 1e-12
"""Least probability in a logarithm; TorchRec's number."""


class MetricPrefix(StrEnum):
    """Samples that a value is over: all, or those of the window."""

    LIFETIME = "lifetime_"
    WINDOW = "window_"


@frozen(eq=False)  # and no tuple, in which torchmetrics would make the value of one task a scalar
class MetricComputationReport:
    """A computed value.

    Args:
        name: the metric's name.
        metric_prefix: samples that the value is over.
        value: one number a task, ``[T]``.
    """

    name: str
    metric_prefix: MetricPrefix
    value: Tensor


class RecMetricComputation(Metric, ABC):
    """A metric of some tasks, from sums over samples; every rank calls `compute`.

    Args:
        my_rank: number of this rank.
        batch_size: samples of a batch on this rank; not needed.
        n_tasks: number of tasks.
        window_size: samples of this rank's window.
        compute_on_all_ranks: report on all ranks; else on rank 0.
        process_group: ranks whose sums are added; all by default.
    """

    num_sums: ClassVar[int]

    def __init__(
        self,
        my_rank: int,
        batch_size: int,
        n_tasks: int,
        window_size: int,
        compute_on_all_ranks: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__(process_group=process_group)
        self._reports, self._window_size = compute_on_all_ranks or my_rank == 0, window_size
        zeros = torch.zeros(self.num_sums, n_tasks, dtype=torch.float64)
        self.add_state("lifetime", zeros, dist_reduce_fx="sum", persistent=True)
        self.add_state("window", zeros.clone(), dist_reduce_fx="sum")
        self._batches: deque[tuple[int, Tensor]] = deque()

    def update(
        self, *, predictions: Tensor, labels: Tensor, weights: Tensor | None = None, **further: Any
    ) -> None:
        """Add a batch, ``[T, N]`` each; without weights each sample has weight 1."""
        p, y = predictions.double(), labels.double()
        sums = torch.stack(
            list(self.sums(p, y, torch.ones_like(y) if weights is None else weights.double(), **further))
        )
        self.lifetime += sums
        self.window += sums
        self._batches.append((labels.shape[-1], sums))
        while len(self._batches) > 1 and sum(count for count, _ in self._batches) > self._window_size:
            self.window -= self._batches.popleft()[1]

    def compute(self) -> list[MetricComputationReport]:
        """Values of all ranks' samples, on ranks that report."""
        of = {MetricPrefix.LIFETIME: self.lifetime, MetricPrefix.WINDOW: self.window} if self._reports else {}
        return [
            MetricComputationReport(name, prefix, value)
            for prefix, sums in of.items()
            for name, value in self.values(*sums).items()
        ]

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        self._batches.clear()

    @abstractmethod
    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sequence[Tensor]:
        """A batch's part of each sum ``[T]``."""

    @abstractmethod
    def values(self, *sums: Tensor) -> dict[str, Tensor]:
        """Values by name."""


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """A quotient; 0 where there is nothing."""
    return torch.where(whole == 0, 0.0, part / whole)


class NEMetricComputation(RecMetricComputation):
    """Normalized entropy: the cross entropy over that of predicting the share of positive labels."""

    num_sums = 3

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sequence[Tensor]:
        """Cross entropy, bits; positive and negative labels."""
        p = p.clamp(EPSILON, 1 - EPSILON)
        entropy = -(y * p.log2() + (1 - y) * (1 - p).log2())
        return [part.sum(-1) for part in (w * entropy, w * y, w * (1 - y))]

    def values(self, *sums: Tensor) -> dict[str, Tensor]:
        """Normalized entropy."""
        entropy, positive, negative = sums
        share = _ratio(positive, positive + negative).clamp(EPSILON, 1 - EPSILON)
        return {"ne": _ratio(entropy, -(positive * share.log2() + negative * (1 - share).log2()))}


class _Mean(RecMetricComputation):
    """The weighted mean of something of each sample."""

    num_sums = 2
    metric_name: ClassVar[str]

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sequence[Tensor]:
        """That of all samples, and their weights."""
        return (w * self.of_samples(p, y)).sum(-1), w.sum(-1)

    def values(self, *sums: Tensor) -> dict[str, Tensor]:
        """The mean."""
        return {self.metric_name: _ratio(*sums)}

    @abstractmethod
    def of_samples(self, p: Tensor, y: Tensor) -> Tensor:
        """Values that are averaged: ``[T, N]``."""


class AccuracyMetricComputation(_Mean):
    """Share of samples whose prediction, 1 from 0.5 on, is the label."""

    metric_name = "accuracy"

    def of_samples(self, p: Tensor, y: Tensor) -> Tensor:
        """1 for each right sample."""
        return ((p >= 0.5) == y).double()


class MAEMetricComputation(_Mean):
    """Mean absolute error."""

    metric_name = "mae"

    def of_samples(self, p: Tensor, y: Tensor) -> Tensor:
        """Absolute errors."""
        return (y - p).abs()


class MSEMetricComputation(_Mean):
    """Mean squared error and its root."""

    metric_name = "mse"

    def of_samples(self, p: Tensor, y: Tensor) -> Tensor:
        """Squared errors."""
        return (y - p) ** 2

    def values(self, *sums: Tensor) -> dict[str, Tensor]:
        """The mean and its root."""
        mean = _ratio(*sums)
        return {"mse": mean, "rmse": mean.sqrt()}


class GAUCMetricComputation(RecMetricComputation):
    """Mean area under the ROC curve of sessions that have both labels and predictions that differ."""

    num_sums = 2

    def sums(
        self, p: Tensor, y: Tensor, w: Tensor, *, num_candidates: Tensor, **further: Any
    ) -> Sequence[Tensor]:
        """Areas of sessions, and their number; `num_candidates` has the samples of each session, in their order."""
        split = [value.split(num_candidates.tolist(), dim=-1) for value in (p, y, w)]
        areas = torch.stack([_area_of_session(*session) for session in zip(*split, strict=True)], dim=-1)
        return areas.nansum(-1), (~areas.isnan()).double().sum(-1)

    def values(self, *sums: Tensor) -> dict[str, Tensor]:
        """Mean area, 0.5 without a session; and the number of sessions."""
        areas, number = sums
        return {"gauc": torch.where(number == 0, 0.5, areas / number), "gauc_num_samples": number}


class AUCMetricComputation(RecMetricComputation):
    """Area under the ROC curve of the samples of the window, which are gathered from all ranks."""

    num_sums = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # One tensor, of no samples at first: ranks may have different numbers of samples, but not of tensors.
        self.add_state("samples", [], dist_reduce_fx="cat")
        self.samples = [self.lifetime.new_zeros(0, 3, self.lifetime.shape[1])]

    def update(
        self, *, predictions: Tensor, labels: Tensor, weights: Tensor | None = None, **further: Any
    ) -> None:
        """Add a batch, ``[T, N]`` each, and take out the oldest samples that the window has no room for."""
        weights = torch.ones_like(labels) if weights is None else weights
        rows = torch.stack([predictions.double(), labels.double(), weights.double()]).permute(2, 0, 1)
        self.samples = [torch.cat([*self.samples, rows])[-self._window_size :]]

    def compute(self) -> list[MetricComputationReport]:
        """The area of all ranks' samples, 0.5 without any, on ranks that report."""
        if not self._reports:
            return []
        samples = self.samples if isinstance(self.samples, Tensor) else self.samples[0]
        areas = [area_under_roc(*task) for task in samples.permute(2, 1, 0)]
        return [MetricComputationReport("auc", MetricPrefix.WINDOW, torch.stack(areas))]

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        self.samples = [self.lifetime.new_zeros(0, 3, self.lifetime.shape[1])]

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sequence[Tensor]:
        """None: samples are kept."""
        return ()

    def values(self, *sums: Tensor) -> dict[str, Tensor]:
        """None: samples are kept."""
        return {}


def area_under_roc(p: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Area under the ROC curve of one task's samples ``[N]``; 0.5 where a label is missing."""
    order = p.argsort(descending=True)
    ordered = p[order]
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]  # of a run of equal predictions
    true, false = ((w * side)[order].cumsum(0)[is_last] for side in (y, 1 - y))
    if not len(p) or true[-1] == 0 or false[-1] == 0:
        return p.new_tensor(0.5)
    start = p.new_zeros(1)
    return torch.trapezoid(torch.cat([start, true]), torch.cat([start, false])) / (true[-1] * false[-1])


def _area_of_session(p: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Area of one session ``[T]``, NaN where all labels or all predictions are the same."""
    areas = torch.stack([area_under_roc(*task) for task in zip(p, y, w, strict=True)])
    is_flat = (p == p[:, :1]).all(dim=-1)
    one_label = ((w * y).sum(-1) == 0) | ((w * (1 - y)).sum(-1) == 0)
    return torch.where(is_flat | one_label, torch.nan, areas)
