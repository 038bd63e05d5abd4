"""Predicted times of plans beside measured ones: correlation, errors, and the cost of an estimator's choice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from attrs import asdict, frozen

from shardwright.planning.arrays import Floats


@frozen
class Judgement:
    """Truth of an estimator about one workload's plans.

    Args:
        spearman: rank correlation of predicted and measured times; NaN where one does not vary.
        ratio: measured over predicted, the median.
        median_error: median of ``|predicted / measured - 1|``.
        worst_error: the largest.
        error_after_ratio: median after all predictions were multiplied by ``ratio``.
        own_ms: time of the plan that the planner makes with it, when it was measured again beside the quickest ones;
            ``None`` if that was not measured.
        slower: time of that beyond the best of these, as a part of the best.
        picked_slower: time of the measured plan that it says is best beyond the quickest run of any, as a part of that.
        slower_machine: time of a fixed work now, as a part of that when the estimator's constants were measured;
            ``None`` if either is unknown.
    """

    spearman: float
    ratio: float
    median_error: float
    worst_error: float
    error_after_ratio: float
    own_ms: float | None
    slower: float | None
    picked_slower: float
    slower_machine: float | None = None

    @classmethod
    def of(
        cls,
        predicted: Floats,
        measured: Floats,
        own_ms: float | None,
        best_ms: float,
        slower_machine: float | None = None,
    ) -> Judgement:
        """Judge an estimator.

        Args:
            predicted: times that it says, ms; NaN where it says none.
            measured: times that were measured, ms.
            own_ms: time of its own plan, if that was measured, ms.
            best_ms: time of the best plan that was measured as its own one was, ms.
            slower_machine: time of a fixed work now and when its constants were measured.
        """
        known = ~np.isnan(predicted)
        said, took = predicted[known], measured[known]
        ratio = float(np.median(took / said))
        errors = np.abs(said / took - 1)
        scaled = np.abs(said * ratio / took - 1)
        picked = float(took[said.argmin()])
        return cls(
            spearman=rank_correlation(said, took),
            ratio=ratio,
            median_error=float(np.median(errors)),
            worst_error=float(errors.max()),
            error_after_ratio=float(np.median(scaled)),
            own_ms=own_ms,
            slower=None if own_ms is None else own_ms / best_ms - 1,
            picked_slower=picked / float(measured.min()) - 1,
            slower_machine=slower_machine,
        )

    def to_data(self) -> dict[str, Any]:
        """Return JSON data, which has no word for NaN: ``None`` stands for it."""
        return {
            name: None if value is None or math.isnan(value) else round(value, 4)
            for name, value in asdict(self).items()
        }


def rank_correlation(first: Floats, second: Floats) -> float:
    """Spearman's correlation, ties by their mean rank; NaN if one does not vary."""
    ranks = [_mean_ranks(values) for values in (first, second)]
    spreads = [own.std() for own in ranks]
    if not all(spreads):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _mean_ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Floats = (last - (counts - 1) / 2)[place.reshape(-1)]
    return mean
