"""Predicted times of plans beside measured ones: correlation, errors, and the cost of an estimator's choice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
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
        own_ms: measured time of the plan that the planner makes with it; ``None`` if that was not measured.
        slower: time of that beyond the best measured plan, as a part of the best.
        slower_noise: distance of the quartiles of that over the rounds of the final; ``None`` without a final.
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
    slower_noise: float | None
    slower_machine: float | None

    @classmethod
    def of(
        cls,
        predicted: Floats,
        measured: Floats,
        own: int | None,
        finals: Mapping[int, Floats] = MappingProxyType({}),
        slower_machine: float | None = None,
    ) -> Judgement:
        """Judge an estimator.

        The quickest of many runs is in part the luckiest, so that a plan that was chosen before it was measured looks
        slower beside it than it is. Where a final was run, ``slower`` is of its times alone: the median over its rounds
        of the time beside that of the plan whose median is least.

        Args:
            predicted: times that it says, ms; NaN where it says none.
            measured: times that were measured, ms.
            own: its own plan, by number, if that was measured.
            finals: times of the final, ms, one a round, by numbers of plans.
            slower_machine: time of a fixed work now and when its constants were measured.
        """
        known = ~np.isnan(predicted)
        said, took = predicted[known], measured[known]
        ratio, best = float(np.median(took / said)), float(measured.min())
        errors = np.abs(said / took - 1)
        scaled = np.abs(said * ratio / took - 1)
        own_ms = None if own is None else float(measured[own])
        slower, slower_noise = None if own_ms is None else own_ms / best - 1, None
        if own is not None and own in finals:
            quickest = min(finals.values(), key=np.median)
            first, middle, third = np.quantile(finals[own] / quickest, (0.25, 0.5, 0.75)).tolist()
            slower, slower_noise = middle - 1, third - first
        return cls(
            spearman=rank_correlation(said, took),
            ratio=ratio,
            median_error=float(np.median(errors)),
            worst_error=float(errors.max()),
            error_after_ratio=float(np.median(scaled)),
            own_ms=own_ms,
            slower=slower,
            slower_noise=slower_noise,
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
