"""Measured times of steps beside what a plan predicts: by rank and phase, and by kernel group.

Legend: W ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

from shardwright.cli.plans import write_text
from shardwright.errors import InvalidInputError, PlanError
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.text import count_text
from shardwright_plugins.estimators.engine import Engine
from shardwright_plugins.following.predicted import Predicted, Prices
from shardwright_plugins.following.refit import refitted
from shardwright_plugins.following.times import KERNEL_PHASES, PHASES, MeasuredTimes, placement_of

_SHOWN, _TABLES = 10, 3
"""Kernel groups that are told, and tables that are named of each: what fits a terminal."""


@frozen
class GroupComparison:
    """Lookups and updates of a kernel group on a rank.

    Args:
        rank: the rank.
        kernel: the compute kernel.
        tables: paths of the tables.
        measured_ms: milliseconds of a step that they took.
        predicted_ms: milliseconds that the plan predicts.
        factor: measured over predicted, of all groups on all ranks together.
    """

    rank: int
    kernel: str
    tables: Sequence[str]
    measured_ms: float
    predicted_ms: float
    factor: float

    @property
    def off_ms(self) -> float:
        """Milliseconds beyond what is predicted, after all predictions were multiplied by the factor."""
        return self.measured_ms - self.factor * self.predicted_ms

    def __str__(self) -> str:
        more = len(self.tables) - _TABLES
        names = ", ".join(self.tables[:_TABLES]) + (f" and {more} more" if more > 0 else "")
        return (
            f"rank {self.rank}, {self.kernel}, {names}: {self.measured_ms:.3g} ms measured, {self.predicted_ms:.3g} "
            f"predicted; {self.off_ms:+.3g} ms after the factor"
        )


def compare_groups(prices: Prices, times: MeasuredTimes) -> list[GroupComparison]:
    """Compare the lookups and updates of each kernel group with a plan; those come first that are furthest off.

    Args:
        prices: prices of the plan's tables.
        times: measured times of the plan.

    Raises:
        InvalidInputError: the times are of another plan.
    """
    _check(prices, times)
    found = []
    for number, rank in enumerate(times.ranks):
        shares = Counter(path for group in rank.groups for path in group.tables)
        for group in rank.groups:
            predicted = sum(
                own[path][number] / shares[path]
                for phase in KERNEL_PHASES
                if (own := prices.of_tables.get(phase)) is not None
                for path in group.tables
                if path in own
            )
            took = sum(group.phases_ms[phase] for phase in KERNEL_PHASES)
            found.append((number, group.kernel, group.tables, took, float(predicted)))
    said = sum(one[-1] for one in found)
    factor = sum(one[-2] for one in found) / said if said else 1.0
    groups = [GroupComparison(*one, factor) for one in found]
    return sorted(groups, key=lambda group: -abs(group.off_ms))


def _check(prices: Prices, times: MeasuredTimes) -> None:
    world_size = prices.asked.space.topology.world_size
    if len(times.ranks) != world_size:
        raise InvalidInputError(
            f"the times are of {count_text(len(times.ranks), 'rank')}, and the plan is for {world_size}: measure a "
            "training of this plan"
        )
    planned = {table.path for table in prices.asked.options.all_tables}
    measured = {path for rank in times.ranks for group in rank.groups for path in group.tables}
    if unknown := sorted(measured - planned):
        raise InvalidInputError(
            f"the times have the table {unknown[0]!r}, which is not in the plan: measure a training with this plan"
        )
    if times.placement != placement_of(prices.asked.plan):
        raise InvalidInputError(
            "the times are of a plan with the same tables in other places: explain the plan that was trained with "
            "(model.plan.to_json()), which a reshard changes"
        )


def comparison_lines(plan: ShardingPlan, path: Path, refit: Path | None = None) -> Iterator[str]:
    """Tell how far measured times are from a plan's prediction; what ``explain --measured`` prints.

    Args:
        plan: the plan that was trained with.
        path: document that :meth:`StepTimes.write` wrote.
        refit: machine document to write, refitted to the times (``refit.py``).

    Raises:
        PlanError: the plan does not say what was asked of the planner, or has shards of unknown cost.
        InvalidInputError: the document is none of measured times, or of another plan; or the plan was not made by
            ``engine``, and no machine can be refitted.
    """
    times, prices = MeasuredTimes.read(path), Prices.by(plan)
    groups, predicted = compare_groups(prices, times), prices.of(plan)
    if predicted is None:
        raise PlanError(prices.asked.unknown_tables()[0])
    yield (
        f"{count_text(times.num_steps, 'step')} on {count_text(len(times.ranks), 'rank')}; measured / predicted by "
        f"{predicted.estimator}, ms of a step"
    )
    yield from _rank_lines(times, predicted)
    if refit is not None:
        estimator = prices.asked.plugins.performance
        if not isinstance(estimator, Engine):
            raise InvalidInputError(
                f"--refit writes a machine for the estimator 'engine', and the plan is by {predicted.estimator!r}: "
                "plan with estimator='engine'"
            )
        write_text(refit, refitted(estimator.machine, predicted, times).to_json())
        yield f"wrote the machine, refitted to these times, to {refit}"
    if not groups:
        return
    yield f"lookups and updates take {groups[0].factor:.3g} times what is predicted, and after that factor:"
    yield from map(str, groups[:_SHOWN])


def _rank_lines(times: MeasuredTimes, predicted: Predicted) -> Iterator[str]:
    for number, rank in enumerate(times.ranks):
        said = {phase: own[number] for phase, own in predicted.phases_ms.items()}
        others = {phase: ms for phase, ms in said.items() if ms and phase not in PHASES}
        parts = [f"{phase} {took:.3g} / {said.get(phase, 0.0):.3g}" for phase, took in rank.phases_ms.items()]
        yield f"rank {number}: {rank.tables_ms:.3g} / {sum(said.values()):.3g}; {', '.join(parts)}" + (
            f"; {', '.join(others)}: {sum(others.values()):.3g} predicted, and measured within these phases: compare "
            "the sums"
            if others
            else ""
        )
