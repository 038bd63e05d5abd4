"""Documents that people and programs write: workloads, constraints, machines, plans.

Their form is stated in the JSON schemas of ``schemas/``, their limits in one of these. Nothing here knows what a
document means.
"""

from __future__ import annotations

from typing import Any

from shardwright.errors import PlanError
from shardwright.planning.documents.forms import DocumentKind, Place

__all__ = ["CONSTRAINTS", "MACHINE", "PLAN", "WORKLOAD", "DocumentKind"]


def _in_workload(document: Any, place: Place) -> tuple[str, Place]:
    """``table 3 ('user_id')``."""
    if len(place) < 2 or place[0] != "tables":
        return "", place
    entry = document["tables"][place[1]]
    name = entry.get("name") if isinstance(entry, dict) else None
    return f"table {place[1]} ({name!r})" if isinstance(name, str) else f"table {place[1]}", place[2:]


def _in_constraints(document: Any, place: Place) -> tuple[str, Place]:
    """``constraints['user_*']``."""
    return (f"constraints[{place[0]!r}]", place[1:]) if place else ("", place)


def _in_plan(document: Any, place: Place) -> tuple[str, Place]:
    """``module 'tower', table 'user_id', shard 2``."""
    if place[:1] != ["modules"] or len(place) < 2:
        return "the plan document", place
    words = [f"module {place[1]!r}", *(f"table {name!r}" for name in place[2:3])]
    if place[3:4] != ["shards"] or len(place) < 5:
        return ", ".join(words), place[3:]
    return ", ".join([*words, f"shard {place[4]}"]), place[5:]


WORKLOAD = DocumentKind("workload", schema="workload.schema.json", locate=_in_workload)
CONSTRAINTS = DocumentKind("file of constraints", schema="constraints.schema.json", locate=_in_constraints)
MACHINE = DocumentKind("machine document", schema="machine.schema.json")
PLAN = DocumentKind("plan document", schema="plan.schema.json", error=PlanError, locate=_in_plan)
