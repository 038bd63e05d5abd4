"""The refinement `stay_near`: what moves from the plan that a model has costs milliseconds of a step.

A search rates plans by their time alone. Here some plans between the old one and the one that it found are rated by
``t + c m``: ``t`` the objective, or a step's time where the estimator compares plans by it, ms; ``m`` what moves, GiB;
``c`` the cost of a move. Which plans these are does not depend on ``c``. So a larger cost never moves more bytes, and
never gives a faster step: of the least of ``t + c m`` over a fixed set, ``m`` falls and ``t`` rises with ``c``.

The plans are those on two :mod:`trails`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from shardwright.arguments import NonNegativeFloat, brief, typed
from shardwright.cli.plans import read_plan
from shardwright.errors import InvalidInputError
from shardwright.planning.machines.topology import InputValue
from shardwright.planning.options.inputs import Request
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.search.refinements import Outcome, Search
from shardwright.planning.text import bytes_text
from shardwright.planning.watch import Watch
from shardwright_plugins.refinements.trails import OldPlan, Stop, choices_of, stops_of


def _as_plan(plan: Any) -> ShardingPlan:
    if isinstance(plan, str | Path):
        return read_plan(Path(plan))
    if not isinstance(plan, ShardingPlan):
        raise InvalidInputError(
            f"plan must be a ShardingPlan, or the path of its document; got {brief(plan)}"
        )
    return plan


@frozen(eq=False, field_transformer=typed)
class StayNear:
    """A refinement that keeps plans near the one that a model has.

    Args:
        plan: the plan, or the path of its document.
        move_cost: milliseconds that the step must become shorter by for each GiB that moves, weights and optimizer
            states; of equal plans that which moves least is taken.

    Raises:
        InvalidInputError: it is no plan, or the cost is negative or not finite.
    """

    plan: ShardingPlan = field(converter=_as_plan)
    move_cost: NonNegativeFloat = 0.0

    def __call__(self, search: Search, request: Request, watch: Watch) -> Outcome:
        """Search, and take the best plan between what was found and the plan to stay near.

        Raises:
            PlanError: a table of the plan to stay near has another size.
        """
        found = search(request, watch)
        old = OldPlan.of(found, self.plan)
        stops = list(stops_of(old, choices_of(found)))
        if not stops:
            return found
        fastest, best = (min(stops, key=lambda stop: stop.rating(cost)) for cost in (0.0, self.move_cost))
        kept = next((stop.value_ms for stop in stops if stop.choices == old.choices), None)
        inputs = {
            "move_cost_ms_per_gib": InputValue(self.move_cost, "given"),
            "moved_bytes": InputValue(best.moved_bytes, "measured"),
            "fastest_ms": InputValue(fastest.value_ms, "measured"),
            "taken_ms": InputValue(best.value_ms, "measured"),
        }
        return attrs.evolve(
            found.with_plan(best.placed(found.space)),
            inputs={**found.inputs, **inputs},
            notes=(*found.notes, self._note(kept, best, fastest)),
        )

    def _note(self, kept_ms: float | None, best: Stop, fastest: Stop) -> str:
        was = "it cannot be kept" if kept_ms is None else f"it takes {kept_ms:.4g} ms"
        return (
            f"near the plan to stay near ({was}), at {self.move_cost:.4g} ms for each GiB: "
            f"{bytes_text(best.moved_bytes)} move; the fastest plan found takes {fastest.value_ms:.4g} ms and moves "
            f"{bytes_text(fastest.moved_bytes)}"
        )
