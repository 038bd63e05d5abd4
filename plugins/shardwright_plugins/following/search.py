"""The search for a plan near the present one, by what the data are like now; runs in a process of its own.

``python -m shardwright_plugins.following.search FD`` reads a question as JSON and writes a plan document to the file
that is open under that number. It imports no torch, and is nicer than the training beside it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from shardwright.planning.machines.reservations import as_reservation
from shardwright.planning.plan.inputs import InputTables
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.option_space import OptionSpace
from shardwright_plugins.following.predicted import Prices
from shardwright_plugins.plan_differences.measure import Measure
from shardwright_plugins.refinements.stay_near import StayNear

_NICE = 10  # as nice(1) adds by default


def with_statistics(plan: ShardingPlan, ids_per_bag: Mapping[str, Sequence[float]]) -> ShardingPlan:
    """A plan whose document asks for tables that are used otherwise.

    Args:
        plan: the plan.
        ids_per_bag: path of a table -> ids per bag of each of its features.

    Raises:
        PlanError: the document does not say what was asked of the planner.
    """
    asked = InputTables.of(plan.document)
    changed = {
        table.path: evolve(asked.constraints.of(table), pooling_factors=ids_per_bag[table.path])
        for table in asked.tables.values()
        if table.path in ids_per_bag
    }
    constraints = Constraints({**asked.constraints.rules, **changed})
    told = {"value": constraints.to_data(), "provenance": "measured"}
    inputs = {**plan.document.get("inputs", {}), "constraints": told}
    return evolve(plan, document={**plan.document, "inputs": inputs})


def plan_near(
    plan: ShardingPlan,
    ids_per_bag: Mapping[str, Sequence[float]],
    *,
    move_cost: float,
    measured_ms: float | None = None,
) -> ShardingPlan:
    """Search for a plan near another, asked what that was asked, with other ids per bag.

    Args:
        plan: the present plan.
        ids_per_bag: path of a table -> ids per bag of each of its features.
        move_cost: real milliseconds of a step for each GiB that moves.
        measured_ms: real milliseconds of the tables' part of a step; all predictions are off by one factor, by which
            the cost of moves is divided. ``None``: they are true.

    Raises:
        ShardwrightError: the plan does not say what was asked, or the search found none.
    """
    now = with_statistics(plan, ids_per_bag)
    prices = Prices.by(now)
    predicted = prices.of(now)
    factor = 1.0
    if measured_ms and predicted is not None and predicted.step_ms > 0:
        factor = measured_ms / predicted.step_ms
    inputs: Mapping[str, Any] = now.document["inputs"]
    space = inputs.get("option_space")
    asked = InputTables.of(now.document)
    planner = TablePlanner(
        prices.asked.space.topology,
        inputs["batch_size"]["value"],
        constraints=asked.constraints.rules,
        estimator=inputs["estimator"]["value"],
        storage_estimator=inputs["storage_estimator"]["value"],
        option_space=None if space is None else OptionSpace.from_data(space["value"]),
        proposer=_given(inputs, "proposer"),
        partitioner=_given(inputs, "partitioner"),
        seconds=_given(inputs, "seconds_limit"),
        storage_reservation=as_reservation(inputs["storage_reservation"]["value"]),
        objective=prices.asked.space.objective,
        refinements=StayNear(now, move_cost / factor),
        progress=False,
    )
    found = planner.plan_tables(list(asked.tables.values()))
    kept_ms = None
    if predicted is not None:
        kept = prices.asked.loaded_plan()
        kept_ms = Measure(prices.asked.plugins.performance, kept.space).of(kept.phases_ms, kept.proposal)
    told = {"kept_ms": kept_ms, "factor": round(factor, 6)}
    inputs = {
        **found.document["inputs"],
        **{name: {"value": own, "provenance": "measured"} for name, own in told.items()},
    }
    return evolve(found, document={**found.document, "inputs": inputs})


def _given(inputs: Mapping[str, Any], name: str) -> Any:
    """Value that a planner was given under a name; ``None`` for nothing."""
    return inputs.get(name, {}).get("value")


def main() -> None:
    """Answer the question on the standard input."""
    os.nice(_NICE)
    question = json.load(sys.stdin)
    number = int(sys.argv[1])
    found = plan_near(ShardingPlan.from_json(question.pop("plan")), question.pop("ids_per_bag"), **question)
    with os.fdopen(number, "w", encoding="utf-8") as file:
        file.write(found.to_json())


if __name__ == "__main__":
    main()
