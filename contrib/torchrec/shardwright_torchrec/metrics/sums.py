"""Metrics that follow from weighted sums over samples.

Legend: T tasks, N samples of a batch; p prediction, y label, w weight of a sample. Sums are float64 ``[T]``.
Normalized entropy and calibration: He and others 2014, "Practical lessons from predicting clicks on ads at Facebook".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwright_torchrec.metrics.ranked import area_under_roc
from shardwright_torchrec.metrics.rec_metric import (
    LIFETIME,
    WINDOW,
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
    RecMetricException,
)

__all__ = [
    "AccuracyMetric",
    "AverageMetric",
    "CTRMetric",
    "CalibrationMetric",
    "GAUCMetric",
    "MAEMetric",
    "MSEMetric",
    "NEMetric",
    "NEPositiveMetric",
    "NMSEMetric",
    "NumPositiveSamplesMetric",
    "PrecisionMetric",
    "RecMetricException",
    "RecalibratedCalibrationMetric",
    "RecalibratedNEMetric",
    "RecallMetric",
    "SumWeightsMetric",
    "UnweightedNEMetric",
    "WeightedAvgMetric",
    "WeightedSumPredictionsMetric",
]

EPSILON = 1e-12
"""Least probability in a logarithm; TorchRec's number."""

Sums = Mapping[str, Tensor]


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """A quotient; 0 where there is nothing."""
    return torch.where(whole == 0, 0.0, part / whole)


def _cross_entropy(predictions: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each sample, bits ``[T, N]``."""
    p = predictions.clamp(EPSILON, 1 - EPSILON)
    return -(labels * p.log2() + (1 - labels) * (1 - p).log2())


def _entropy(positive: Tensor, negative: Tensor) -> Tensor:
    """Summed cross entropy of predicting the share of positive labels each time, bits ``[T]``."""
    share = _ratio(positive, positive + negative).clamp(EPSILON, 1 - EPSILON)
    return -(positive * share.log2() + negative * (1 - share).log2())


class SumsComputation(RecMetricComputation):
    """A metric that a function of sums gives; subclasses say which sums, and which function."""

    states: ClassVar[tuple[str, ...]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self.states:
            zeros = torch.zeros(self._n_tasks, dtype=torch.float64)
            self._add_state(name, zeros, add_window_state=True, dist_reduce_fx="sum", persistent=True)

    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Add a batch's sums."""
        if predictions is None or weights is None:
            raise RecMetricException(f"{type(self).__name__} needs predictions and weights")
        p, y, w = predictions.double(), labels.double(), weights.double()
        for name, value in self.sums(p, y, w, **kwargs).items():
            getattr(self, name).add_(value)
            self._aggregate_window_state(name, value, labels.shape[-1])

    def _compute(self) -> list[MetricComputationReport]:
        lifetime = {name: getattr(self, name) for name in self.states}
        window = {name: self.get_window_state(name) for name in self.states}
        return [
            MetricComputationReport(name, prefix, value)
            for prefix, sums in ((LIFETIME, lifetime), (WINDOW, window))
            for name, value in self.values(sums).items()
        ]

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """A batch's part of each state."""
        raise NotImplementedError

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Values by name."""
        raise NotImplementedError


class NEMetricComputation(SumsComputation):
    """Normalized entropy: the cross entropy over that of predicting the share of positive labels."""

    states = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")

    def __init__(self, *args: Any, include_logloss: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._include_logloss = include_logloss

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Cross entropy, samples, positive and negative labels."""
        parts = (w * _cross_entropy(p, y), w, w * y, w * (1 - y))
        return {name: part.sum(-1) for name, part in zip(self.states, parts, strict=True)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Normalized entropy; and the mean cross entropy, bits, if it is asked for."""
        values = {"ne": _ratio(sums["cross_entropy_sum"], _entropy(sums["pos_labels"], sums["neg_labels"]))}
        if self._include_logloss:
            values["logloss"] = _ratio(sums["cross_entropy_sum"], sums["weighted_num_samples"])
        return values


class RecalibratedNEMetricComputation(NEMetricComputation):
    """Normalized entropy of predictions that downsampled negatives have raised: p / (p + (1 - p) / coefficient)."""

    def __init__(self, *args: Any, recalibration_coefficient: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._coefficient = recalibration_coefficient

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Sums of normalized entropy, of recalibrated predictions."""
        return super().sums(p / (p + (1 - p) / self._coefficient), y, w)


class UnweightedNEMetricComputation(NEMetricComputation):
    """Normalized entropy where each sample has weight 1."""

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Sums of normalized entropy, without weights."""
        return super().sums(p, y, torch.ones_like(w))

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Normalized entropy, under a name of its own."""
        return {name.replace("ne", "unweighted_ne"): value for name, value in super().values(sums).items()}


class NEPositiveMetricComputation(SumsComputation):
    """Part of normalized entropy that positive samples have."""

    states = ("cross_entropy_positive_sum", "weighted_num_samples", "pos_labels", "neg_labels")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Cross entropy of positive samples, samples, positive and negative labels."""
        parts = (w * y * _cross_entropy(p, y), w, w * y, w * (1 - y))
        return {name: part.sum(-1) for name, part in zip(self.states, parts, strict=True)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Cross entropy of positive samples over the entropy of all labels."""
        entropy = _entropy(sums["pos_labels"], sums["neg_labels"])
        return {"ne_positive": _ratio(sums["cross_entropy_positive_sum"], entropy)}


class CTRMetricComputation(SumsComputation):
    """Click-through rate: the mean label."""

    states = ("ctr_num", "ctr_denom")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Labels and weights."""
        return {"ctr_num": (w * y).sum(-1), "ctr_denom": w.sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Mean label."""
        return {"ctr": _ratio(sums["ctr_num"], sums["ctr_denom"])}


class CalibrationMetricComputation(SumsComputation):
    """Calibration: predictions over labels."""

    states = ("calibration_num", "calibration_denom")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Predictions and labels."""
        return {"calibration_num": (w * p).sum(-1), "calibration_denom": (w * y).sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Summed predictions over summed labels."""
        return {"calibration": _ratio(sums["calibration_num"], sums["calibration_denom"])}


class RecalibratedCalibrationMetricComputation(CalibrationMetricComputation):
    """Calibration of predictions that downsampled negatives have raised: p / (p + (1 - p) / coefficient)."""

    def __init__(self, *args: Any, recalibration_coefficient: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._coefficient = recalibration_coefficient

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Recalibrated predictions, and labels."""
        return super().sums(p / (p + (1 - p) / self._coefficient), y, w)


class MSEMetricComputation(SumsComputation):
    """Mean squared error and its root; the share of variance explained if it is asked for."""

    states = ("error_sum", "weighted_num_samples", "label_sum", "label_squared_sum")

    def __init__(self, *args: Any, include_r_squared: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._include_r_squared = include_r_squared

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Squared errors, weights, labels and their squares."""
        parts = (w * (y - p) ** 2, w, w * y, w * y**2)
        return {name: part.sum(-1) for name, part in zip(self.states, parts, strict=True)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Mean squared error, its root and, if asked for, 1 - error / variance."""
        error, samples = sums["error_sum"], sums["weighted_num_samples"]
        values = {"mse": _ratio(error, samples), "rmse": _ratio(error, samples).sqrt()}
        if self._include_r_squared:
            variance = sums["label_squared_sum"] - _ratio(sums["label_sum"] ** 2, samples)
            values["r_squared"] = 1 - _ratio(error, variance)
        return values


class NMSEMetricComputation(SumsComputation):
    """Squared error over that of predicting 1 each time, and its root."""

    states = ("error_sum", "const_pred_error_sum")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Squared errors of the predictions, and of 1."""
        return {
            "error_sum": (w * (y - p) ** 2).sum(-1),
            "const_pred_error_sum": (w * (y - 1) ** 2).sum(-1),
        }

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """The quotient and its root."""
        value = _ratio(sums["error_sum"], sums["const_pred_error_sum"])
        return {"nmse": value, "nrmse": value.sqrt()}


class MAEMetricComputation(SumsComputation):
    """Mean absolute error."""

    states = ("error_sum", "weighted_num_samples")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Absolute errors and weights."""
        return {"error_sum": (w * (y - p).abs()).sum(-1), "weighted_num_samples": w.sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Mean absolute error."""
        return {"mae": _ratio(sums["error_sum"], sums["weighted_num_samples"])}


class _Thresholded(SumsComputation):
    """A metric of predictions that a threshold has turned into 0 or 1."""

    def __init__(self, *args: Any, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threshold = threshold

    def _taken(self, p: Tensor) -> Tensor:
        return (p >= self._threshold).double()


class AccuracyMetricComputation(_Thresholded):
    """Share of samples whose thresholded prediction is the label."""

    states = ("accuracy_sum", "weighted_num_samples")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Right samples, and all."""
        return {"accuracy_sum": (w * (self._taken(p) == y)).sum(-1), "weighted_num_samples": w.sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Share of right samples."""
        return {"accuracy": _ratio(sums["accuracy_sum"], sums["weighted_num_samples"])}


class PrecisionMetricComputation(_Thresholded):
    """Share of samples predicted positive that are."""

    states = ("true_pos_sum", "false_pos_sum")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """True and false positives."""
        taken = w * self._taken(p)
        return {"true_pos_sum": (taken * y).sum(-1), "false_pos_sum": (taken * (1 - y)).sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """True positives over predicted positives."""
        true = sums["true_pos_sum"]
        return {"precision": _ratio(true, true + sums["false_pos_sum"])}


class RecallMetricComputation(_Thresholded):
    """Share of positive samples that are predicted positive."""

    states = ("true_pos_sum", "false_neg_sum")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """True positives and false negatives."""
        taken = self._taken(p)
        return {
            "true_pos_sum": (w * y * taken).sum(-1),
            "false_neg_sum": (w * y * (1 - taken)).sum(-1),
        }

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """True positives over positives."""
        true = sums["true_pos_sum"]
        return {"recall": _ratio(true, true + sums["false_neg_sum"])}


class WeightedAvgMetricComputation(SumsComputation):
    """Mean prediction."""

    states = ("weighted_sum", "weighted_num_samples")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Predictions and weights."""
        return {"weighted_sum": (w * p).sum(-1), "weighted_num_samples": w.sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Mean prediction."""
        return {"weighted_avg": _ratio(sums["weighted_sum"], sums["weighted_num_samples"])}


class AverageMetricComputation(SumsComputation):
    """Mean label and mean prediction."""

    states = ("label_sum", "prediction_sum", "weighted_num_samples")

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Labels, predictions and weights."""
        return {
            "label_sum": (w * y).sum(-1),
            "prediction_sum": (w * p).sum(-1),
            "weighted_num_samples": w.sum(-1),
        }

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Mean label and mean prediction."""
        samples = sums["weighted_num_samples"]
        return {
            "label_average": _ratio(sums["label_sum"], samples),
            "prediction_average": _ratio(sums["prediction_sum"], samples),
        }


class SumWeightsMetricComputation(SumsComputation):
    """Sum of weights."""

    states = ("sum_weights",)

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Weights."""
        return {"sum_weights": w.sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Sum of weights."""
        return dict(sums)


class NumPositiveSamplesMetricComputation(SumsComputation):
    """Sum of labels."""

    states = ("num_positive_samples",)

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Labels."""
        return {"num_positive_samples": (w * y).sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Sum of labels."""
        return dict(sums)


class WeightedSumPredictionsMetricComputation(SumsComputation):
    """Sum of predictions."""

    states = ("weighted_sum_predictions",)

    def sums(self, p: Tensor, y: Tensor, w: Tensor, **further: Any) -> Sums:
        """Predictions."""
        return {"weighted_sum_predictions": (w * p).sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Sum of predictions."""
        return dict(sums)


class GAUCMetricComputation(SumsComputation):
    """Mean area under the ROC curve of sessions that have both labels and predictions that differ."""

    states = ("auc_sum", "num_samples")
    required_inputs = ("num_candidates",)

    def sums(self, p: Tensor, y: Tensor, w: Tensor, *, num_candidates: Tensor, **further: Any) -> Sums:
        """Areas of sessions, and their number; `num_candidates` has the samples of each session, in their order."""
        sessions = range(len(num_candidates))
        split = [value.split(num_candidates.tolist(), dim=-1) for value in (p, y, w)]
        areas = torch.stack(
            [_sessions_area(*(part[number] for part in split)) for number in sessions], dim=-1
        )
        return {"auc_sum": areas.nansum(-1), "num_samples": (~areas.isnan()).double().sum(-1)}

    def values(self, sums: Sums) -> dict[str, Tensor]:
        """Mean area, 0.5 without a session; and the number of sessions."""
        number = sums["num_samples"]
        return {"gauc": torch.where(number == 0, 0.5, sums["auc_sum"] / number), "gauc_num_samples": number}


def _sessions_area(p: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Area of one session ``[T]``, NaN where all labels or all predictions are the same."""
    areas = [area_under_roc(*samples) for samples in zip(p, y, w, strict=True)]
    is_flat = (p == p[:, :1]).all(dim=-1)
    one_label = ((w * y).sum(-1) == 0) | ((w * (1 - y)).sum(-1) == 0)
    return torch.where(is_flat | one_label, torch.nan, torch.stack(areas))


class NEMetric(RecMetric):
    """Normalized entropy."""

    _namespace, _computation_class = "ne", NEMetricComputation


class NEPositiveMetric(RecMetric):
    """Part of normalized entropy that positive samples have."""

    _namespace, _computation_class = "ne_positive", NEPositiveMetricComputation


class RecalibratedNEMetric(RecMetric):
    """Normalized entropy of recalibrated predictions."""

    _namespace, _computation_class = "recalibrated_ne", RecalibratedNEMetricComputation


class UnweightedNEMetric(RecMetric):
    """Normalized entropy without weights."""

    _namespace, _computation_class = "unweighted_ne", UnweightedNEMetricComputation


class CTRMetric(RecMetric):
    """Click-through rate."""

    _namespace, _computation_class = "ctr", CTRMetricComputation


class CalibrationMetric(RecMetric):
    """Calibration."""

    _namespace, _computation_class = "calibration", CalibrationMetricComputation


class RecalibratedCalibrationMetric(RecMetric):
    """Calibration of recalibrated predictions."""

    _namespace, _computation_class = "recalibrated_calibration", RecalibratedCalibrationMetricComputation


class MSEMetric(RecMetric):
    """Mean squared error."""

    _namespace, _computation_class = "mse", MSEMetricComputation


class NMSEMetric(RecMetric):
    """Squared error over that of predicting 1."""

    _namespace, _computation_class = "nmse", NMSEMetricComputation


class MAEMetric(RecMetric):
    """Mean absolute error."""

    _namespace, _computation_class = "mae", MAEMetricComputation


class AccuracyMetric(RecMetric):
    """Accuracy."""

    _namespace, _computation_class = "accuracy", AccuracyMetricComputation


class PrecisionMetric(RecMetric):
    """Precision."""

    _namespace, _computation_class = "precision", PrecisionMetricComputation


class RecallMetric(RecMetric):
    """Recall."""

    _namespace, _computation_class = "recall", RecallMetricComputation


class WeightedAvgMetric(RecMetric):
    """Mean prediction."""

    _namespace, _computation_class = "weighted_avg", WeightedAvgMetricComputation


class AverageMetric(RecMetric):
    """Mean label and mean prediction."""

    _namespace, _computation_class = "average", AverageMetricComputation


class SumWeightsMetric(RecMetric):
    """Sum of weights."""

    _namespace, _computation_class = "sum_weights", SumWeightsMetricComputation


class NumPositiveSamplesMetric(RecMetric):
    """Sum of labels."""

    _namespace, _computation_class = "num_positive_samples", NumPositiveSamplesMetricComputation


class WeightedSumPredictionsMetric(RecMetric):
    """Sum of predictions."""

    _namespace, _computation_class = "weighted_sum_predictions", WeightedSumPredictionsMetricComputation


class GAUCMetric(RecMetric):
    """Mean area under the ROC curve of sessions."""

    _namespace, _computation_class = "gauc", GAUCMetricComputation
