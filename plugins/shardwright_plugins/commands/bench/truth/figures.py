"""Predicted times of plans beside measured ones: correlation, errors, and the cost of an estimator's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import asdict, evolve, frozen

from shardwright.errors import PlanError
from shardwright.host import host
from shardwright.planning.arrays import Floats
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.report.rederived import Rederived
from shardwright.planning.search.objectives import largest_rank_time, phase_loads
from shardwright.planning.search.placement import propose


@frozen
class Predicted:
    """An estimator's price of a plan.

    Args:
        step_ms: time of a step, that of the rank whose phases take longest.
        phases_ms: phase of a step -> milliseconds on each rank.
    """

    step_ms: float
    phases_ms: Mapping[str, Sequence[float]]


class Prices:
    """An estimator's prices of plans of one workload, which was asked of all alike.

    Args:
        estimator: name, as ``--estimator`` has it.
        plan: any of the plans, with its document.
    """

    def __init__(self, estimator: str, plan: ShardingPlan) -> None:
        inputs = {**plan.document["inputs"], "estimator": {"value": estimator, "provenance": "given"}}
        asked = evolve(plan, document={**plan.document, "inputs": inputs})
        self._space = Rederived.of(asked, host())

    def of(self, plan: ShardingPlan) -> Predicted | None:
        """Price a plan; ``None`` if it has options that the estimator knows nothing of."""
        try:
            placed = evolve(self._space, plan=plan).placed_plan()
        except PlanError:
            return None
        space = self._space.space
        loads = phase_loads(space, placed.proposal, propose(space, placed.proposal), placed.ranks)
        performance = self._space.plugins.performance
        phases = performance.step_phases(loads, space.options, placed.proposal, space.topology)
        told = {name: own.round(5).tolist() for name, own in phases.items() if own.any()}
        return Predicted(round(largest_rank_time(phases), 5), told)


@frozen
class Judgement:
    """Truth of an estimator about one workload's plans.

    Args:
        spearman: rank correlation of predicted and measured times.
        ratio: measured over predicted, the median.
        median_error: median of ``|predicted / measured - 1|``.
        worst_error: the largest.
        error_after_ratio: median after all predictions were multiplied by ``ratio``.
        own_ms: measured time of the plan that the planner makes with it; ``None`` if that was not measured.
        slower: time of that beyond the best measured plan, as a part of the best.
        picked_slower: the same of the measured plan that it says is best.
    """

    spearman: float
    ratio: float
    median_error: float
    worst_error: float
    error_after_ratio: float
    own_ms: float | None
    slower: float | None
    picked_slower: float

    @classmethod
    def of(cls, predicted: Floats, measured: Floats, own: int | None) -> Judgement:
        """Judge an estimator.

        Args:
            predicted: times that it says, ms; NaN where it says none.
            measured: times that were measured, ms.
            own: its own plan, by number, if that was measured.
        """
        known = ~np.isnan(predicted)
        said, took = predicted[known], measured[known]
        ratio, best = float(np.median(took / said)), float(measured.min())
        errors = np.abs(said / took - 1)
        scaled = np.abs(said * ratio / took - 1)
        picked = float(took[said.argmin()])
        own_ms = None if own is None else float(measured[own])
        return cls(
            spearman=rank_correlation(said, took),
            ratio=ratio,
            median_error=float(np.median(errors)),
            worst_error=float(errors.max()),
            error_after_ratio=float(np.median(scaled)),
            own_ms=own_ms,
            slower=None if own_ms is None else own_ms / best - 1,
            picked_slower=picked / best - 1,
        )

    def to_data(self) -> dict[str, Any]:
        """Return JSON data."""
        return {name: value if value is None else round(value, 4) for name, value in asdict(self).items()}


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
