"""A plan document checked: its value and memory are added up again, its bound is proven again.

Nothing of the search is used, and nothing that it computed: the sharding types are asked for their options and the
estimators for their costs again, and the rest is the arithmetic below. Legend: A tables, O options of all distinct
tables, S runs of equal shards, W ranks, M memory tiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

from shardwright.errors import PlanError
from shardwright.planning.plan import ShardingPlan
from shardwright.planning.rederived import Rederived
from shardwright.planning.text import bytes_text

# Sums of the same numbers in another order differ by rounding.
_TOLERANCE = 1e-9


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
    if claims.get("name", "largest_rank_time") != "largest_rank_time":
        raise PlanError(f"the objective {claims['name']!r} cannot be checked; 'largest_rank_time' can")
    chosen, ranks = again.match()
    tables = again.options.all_tables
    problems = [again.unknown_text(t) for t, option in zip(tables, chosen, strict=True) if option is None]
    value = None
    if not problems:
        loads, used = _added_up(again, [option for option in chosen if option is not None], ranks)
        value = float(loads.max())
        problems += [*_memory_problems(again, used), *_rule_problems(again, ranks)]
    claimed = claims.get("value_ms")
    if value is not None and not _close(claimed, value):
        problems.append(f"the document says value_ms = {claimed}; the shards' costs add up to {value}")
    bound = float(claims.get("lower_bound_ms") or 0.0)
    if bound > 0:
        reason = _why_unproven(again, bound, claims.get("certificate") or {})
        if reason:
            problems.append(f"the bound of {bound} ms is not proven: {reason}")
            bound = 0.0
    if value is not None and bound > value * (1 + _TOLERANCE):
        problems.append(f"the bound of {bound} ms is above the plan's own value of {value} ms")
    return CheckedPlan(problems, value, bound)


def _close(claimed: Any, value: float) -> bool:
    return isinstance(claimed, int | float) and abs(claimed - value) <= _TOLERANCE * max(abs(value), 1e-300)


def _shard_costs(again: Rederived) -> np.ndarray[Any, Any]:
    """What each shard of a run adds to its rank's time: all phases, ``[S]``."""
    total: np.ndarray[Any, Any] = sum(again.space.phases.values(), np.zeros(again.options.num_shards))
    return total


def _added_up(again: Rederived, chosen: list[int], ranks: list[list[int]]) -> tuple[Any, Any]:
    """Time and memory of each rank: ``[W]``, ``[W, M]``."""
    cost, memory, options = _shard_costs(again), again.space.memory_bytes, again.options
    loads, used = np.zeros(len(again.space.capacity_bytes)), np.zeros_like(again.space.capacity_bytes)
    for option, places in zip(chosen, ranks, strict=True):
        runs = options.shards_of(option)
        shard = np.repeat(np.arange(runs.start, runs.stop), options.count[runs])
        np.add.at(loads, places, cost[shard])
        np.add.at(used, places, memory[shard])
    return loads, used


def _memory_problems(again: Rederived, used: Any) -> Iterator[str]:
    for rank, tier in np.argwhere(used > again.space.capacity_bytes).tolist():
        yield (
            f"rank {rank} holds {bytes_text(used[rank, tier])} of {again.space.tiers[tier]}; it may use "
            f"{bytes_text(again.space.capacity_bytes[rank, tier])}"
        )


def _rule_problems(again: Rederived, ranks: list[list[int]]) -> list[str]:
    broken = again.space.rules.broken(dict(enumerate(ranks))) if again.space.rules else ""
    return [f"the constraints are not kept: {broken}"] if broken else []


def _why_unproven(again: Rederived, bound: float, certificate: Mapping[str, Any]) -> str:
    """Why the certificate does not prove the bound; empty if it does.

    A plan whose slowest rank takes less than ``z`` has no shard that takes ``z``, and less than ``W * z`` in all. So
    there is none if the options without such a shard take ``W * z`` or more, priced with what they need of memory
    that is short: with ``lambda >= 0``, ``sum of min(time + lambda * bytes) - lambda * all memory`` is no more than
    the time of any plan that fits (Lagrangian relaxation; Everett 1963).
    """
    z, given = certificate.get("z_ms"), certificate.get("multipliers", {})
    prices = np.array([float(given.get(tier, 0.0)) for tier in again.space.tiers])
    if not isinstance(z, int | float) or not (prices >= 0).all() or not np.isfinite(prices).all():
        return (
            f"the certificate must have z_ms and multipliers of tiers, none negative; got {dict(certificate)}"
        )
    if bound > z * (1 + _TOLERANCE):
        return f"the certificate is for {z} ms"
    options, space = again.options, again.space
    cost, priced = _shard_costs(again), _shard_costs(again) + space.memory_bytes @ prices
    possible = (cost < z * (1 - _TOLERANCE)) & (space.memory_bytes <= space.capacity_bytes.max(axis=0)).all(
        axis=1
    )
    least = np.full(len(options.tables), np.inf)
    for option in range(options.num_options):
        runs = options.shards_of(option)
        if possible[runs].all():
            total = float((priced[runs] * options.count[runs]).sum())
            least[options.table[option]] = min(least[options.table[option]], total)
    needed = float(least[options.alike].sum() - (space.capacity_bytes.sum(axis=0) * prices).sum())
    world_size = len(space.capacity_bytes)
    if needed >= world_size * z * (1 - _TOLERANCE):
        return ""
    return f"tables need {needed} ms at its prices, and {world_size} ranks have {world_size * z} ms before {z} ms"
