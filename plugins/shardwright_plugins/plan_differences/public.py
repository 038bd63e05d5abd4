"""Public names of comparisons of plans."""

from __future__ import annotations

from shardwright_plugins.plan_differences.compare import PlanDifference, compare_plans
from shardwright_plugins.plan_differences.explain import Explanation, explain_table

__all__ = ["Explanation", "PlanDifference", "compare_plans", "explain_table"]
