"""A plan document checked: its value and memory are added up again, its bound is proven again.

Nothing of the search is used, and nothing that it computed: the sharding types are asked for their options and the
estimators for their costs again; the rest is arithmetic, here and in the proof of the bound. Legend: S runs of equal
shards, W ranks, M memory tiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

from shardwright.planning.objectives import OBJECTIVES
from shardwright.planning.plan import ShardingPlan
from shardwright.planning.proof import TOLERANCE, why_unproven
from shardwright.planning.rederived import Rederived
from shardwright.planning.text import bytes_text
from shardwright.planning.watch import gap_of

_GAP_TOLERANCE = 1e-6


@frozen
class CheckedPlan:
    """What a check found.

    Args:
        problems: what is wrong, a sentence each; none if the plan is what its document says.
        value_ms: the objective as added up again; ``None`` if it could not be.
        lower_bound_ms: what is proven again that no plan is better than; 0 if nothing is.
    """

    problems: list[str] = field(factory=list)
    value_ms: float | None = None
    lower_bound_ms: float = 0.0


def check_plan(plan: ShardingPlan) -> CheckedPlan:
    """Check a loaded plan: its costs, its memory, and its bound.

    Args:
        plan: from :meth:`ShardingPlan.from_json`, which has checked its form and that it covers its tables.

    Raises:
        PlanError: the document does not say what the planner was asked.
        ShardwrightError: what it was asked cannot be asked here, for a plugin is missing, say.
    """
    again = Rederived.of(plan)
    claims = plan.document.get("objective", {})
    chosen, ranks = again.match()
    tables = again.options.all_tables
    problems = [again.unknown_text(t) for t, option in zip(tables, chosen, strict=True) if option is None]
    value = None
    if not problems:
        phases, used = _added_up(again, [option for option in chosen if option is not None], ranks)
        value = OBJECTIVES[again.space.objective](phases)
        problems += [*_memory_problems(again, used), *_rule_problems(again, ranks)]
    claimed = claims.get("value_ms")
    if value is not None and not _close(claimed, value):
        problems.append(f"the document says value_ms = {claimed}; the shards' costs add up to {value}")
    bound = float(claims.get("lower_bound_ms") or 0.0)
    if bound > 0:
        reason = why_unproven(again.space, bound, claims.get("certificate") or {})
        if reason:
            problems.append(f"the bound of {bound} ms is not proven: {reason}")
            bound = 0.0
    problems += _gap_problems(claims)
    if value is not None and bound > value * (1 + TOLERANCE):
        problems.append(f"the bound of {bound} ms is above the plan's own value of {value} ms")
    return CheckedPlan(problems, value, bound)


def _gap_problems(claims: Mapping[str, Any]) -> Iterator[str]:
    """That the gap that is claimed is not that of the value and the bound that are."""
    value, bound, gap = (claims.get(key) for key in ("value_ms", "lower_bound_ms", "gap"))
    if value is None or bound is None or gap is None:
        return
    real = gap_of(value, bound)
    if abs(gap - real) > _GAP_TOLERANCE:
        yield f"the document says gap = {gap}; its value_ms and lower_bound_ms make {real}"


def _close(claimed: Any, value: float) -> bool:
    return isinstance(claimed, int | float) and abs(claimed - value) <= TOLERANCE * max(abs(value), 1e-300)


def _added_up(again: Rederived, chosen: list[int], ranks: list[list[int]]) -> tuple[dict[str, Any], Any]:
    """Time of each rank in each phase, ``[W]``, and its memory, ``[W, M]``."""
    options, world_size = again.options, len(again.space.capacity_bytes)
    runs = [options.shards_of(option) for option in chosen]
    shard = np.concatenate([np.repeat(np.arange(r.start, r.stop), options.count[r]) for r in runs])
    places = np.concatenate([np.asarray(own, dtype=np.int64) for own in ranks])
    used = np.zeros_like(again.space.capacity_bytes)
    np.add.at(used, places, again.space.memory_bytes[shard])
    phases = {
        phase: np.bincount(places, weights=cost[shard], minlength=world_size)
        for phase, cost in again.space.phases.items()
    }
    return phases, used


def _memory_problems(again: Rederived, used: Any) -> Iterator[str]:
    for rank, tier in np.argwhere(used > again.space.capacity_bytes).tolist():
        yield (
            f"rank {rank} holds {bytes_text(used[rank, tier])} of {again.space.tiers[tier]}; it may use "
            f"{bytes_text(again.space.capacity_bytes[rank, tier])}"
        )


def _rule_problems(again: Rederived, ranks: list[list[int]]) -> list[str]:
    broken = again.space.rules.broken(dict(enumerate(ranks))) if again.space.rules else ""
    return [f"the constraints are not kept: {broken}"] if broken else []
