"""A plan document checked: its value and memory are added up again, its bound is proven again.

Nothing of the search is used, and nothing that it computed: the sharding types are asked for their options and the
estimators for their costs again; the rest is arithmetic, here and in the proof of the bound. Legend: S runs of equal
shards, W ranks, M memory tiers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from shardwright.errors import PlanError
from shardwright.host.plugin_host import host
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.proofs import TOLERANCE, why_unproven
from shardwright.planning.text import bytes_text
from shardwright.planning.watch import gap_of
from shardwright_plugins.plan_differences.rederived import Rederived

_GAP_TOLERANCE = 1e-6


@frozen
class CheckedPlan:
    """Findings of a check.

    Args:
        problems: faults, a sentence each; none if the plan is what its document says.
        misstatements: those of them that are of the document's numbers alone; :func:`restate` puts them right.
        value_ms: the objective as added up again; ``None`` if it could not be.
        lower_bound_ms: bound that is proven again: no plan takes less; 0 if nothing is proven.

    Example:
        >>> import shardwright as sw
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), batch_size=512)
        >>> plan = planner.plan_tables([sw.TableSpec("user", 1_000_000, 64, ["user"])])
        >>> checked = sw.check_plan(sw.ShardingPlan.from_json(plan.to_json()))
        >>> checked.problems, checked.lower_bound_ms <= checked.value_ms
        ([], True)
    """

    problems: list[str] = field(factory=list)
    misstatements: list[str] = field(factory=list)
    value_ms: float | None = None
    lower_bound_ms: float = 0.0


def check_plan(plan: ShardingPlan) -> CheckedPlan:
    """Check a loaded plan: its costs, its memory, and its bound.

    Args:
        plan: plan from :meth:`ShardingPlan.from_json`, which has checked its form and that it covers its tables.

    Raises:
        PlanError: the document does not say what the planner was asked.
        ShardwrightError: the planner cannot be asked the same here, for a plugin is missing, say.

    Example:
        >>> import shardwright as sw
        >>> tables = [sw.TableSpec("user", 1_000_000, 64, ["user"]), sw.TableSpec("shop", 1000, 64, ["shop"])]
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), batch_size=512)
        >>> plan = planner.plan_tables(tables)
        >>> sw.check_plan(sw.ShardingPlan.from_json(plan.to_json())).problems
        []
    """
    again = Rederived.of(plan, host())
    claims = plan.document.get("objective", {})
    problems = again.unknown_tables()
    misstatements: list[str] = []
    value_ms = None
    if not problems:
        placed = again.loaded_plan()
        value_ms = placed.value_ms
        problems += [*_memory_problems(again, placed.used_bytes), *_rule_problems(again)]
        if not is_stated(value_ms, plan):
            misstatements.append(
                f"the document says value_ms = {claims.get('value_ms')}; the shards' costs add up to {value_ms}"
            )
    bound = float(claims.get("lower_bound_ms") or 0.0)
    if bound > 0:
        reason = why_unproven(again.space, bound, claims.get("certificate") or {}, host().extensions)
        if reason:
            misstatements.append(f"the bound of {bound} ms is not proven: {reason}")
            bound = 0.0
    misstatements += _gap_misstatements(claims)
    if value_ms is not None and bound > value_ms * (1 + TOLERANCE):
        misstatements.append(f"the bound of {bound} ms is above the plan's own value of {value_ms} ms")
        bound = 0.0
    return CheckedPlan([*problems, *misstatements], misstatements, value_ms, bound)


def is_stated(value_ms: float, plan: ShardingPlan) -> bool:
    """True if a plan's document states this value."""
    stated = plan.document.get("objective", {}).get("value_ms")
    return isinstance(stated, int | float) and abs(stated - value_ms) <= TOLERANCE * max(
        abs(value_ms), 1e-300
    )


def restate(plan: ShardingPlan, found: CheckedPlan) -> ShardingPlan:
    """The plan with a document that says of it what a check found: its value, and the bound as far as it is proven.

    Raises:
        PlanError: its value is not known.
    """
    if found.value_ms is None:
        raise PlanError("the plan's value is not known, so that its document cannot say it")
    gap = gap_of(found.value_ms, found.lower_bound_ms)
    objective = {
        **plan.document.get("objective", {}),
        "value_ms": found.value_ms,
        "lower_bound_ms": found.lower_bound_ms,
        "gap": gap if math.isfinite(gap) else None,
    }
    if found.lower_bound_ms == 0:
        objective.pop("certificate", None)
    return evolve(plan, document={**plan.document, "objective": objective})


def _gap_misstatements(claims: Mapping[str, Any]) -> Iterator[str]:
    """Yield a misstatement where the claimed gap is not that of the claimed value and bound."""
    value, bound, gap = (claims.get(key) for key in ("value_ms", "lower_bound_ms", "gap"))
    if value is None or bound is None or gap is None:
        return
    real = gap_of(value, bound)
    if abs(gap - real) > _GAP_TOLERANCE:
        yield f"the document says gap = {gap}; its value_ms and lower_bound_ms make {real}"


def _memory_problems(again: Rederived, used: Any) -> Iterator[str]:
    for rank, tier in np.argwhere(used > again.space.capacity_bytes).tolist():
        yield (
            f"rank {rank} holds {bytes_text(used[rank, tier])} of {again.space.tiers[tier]}; it may use "
            f"{bytes_text(again.space.capacity_bytes[rank, tier])}"
        )


def _rule_problems(again: Rederived) -> list[str]:
    broken = again.space.rules.broken(dict(enumerate(again.match[1]))) if again.space.rules else ""
    return [f"the constraints are not kept: {broken}"] if broken else []
