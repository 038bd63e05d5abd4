"""Running both sides in turn, over several cases; what was measured is kept when the rest is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from shardwright.errors import ShardwrightError
from shardwright_plugins.commands.bench.sides import Figures, Side

if TYPE_CHECKING:
    from shardwright_plugins.commands.bench.step import StepSettings

_RATIOS = ("min_ms", "median_ms")


@frozen
class Case:
    """One piece of work for both sides.

    Args:
        name: title for people.
        settings: the work.
        goal: the ratio of minima, the first side's over the second's, that is to be reached.
        max_collectives: the most collectives a step that the first side may make.
    """

    name: str
    settings: StepSettings
    goal: float | None = None
    max_collectives: int | None = None


@define(eq=False)
class Outcome:
    """Results of a case so far.

    Attributes:
        case: the case.
        rounds: side -> the figures of each round.
        problems: side -> why it could not be measured.
    """

    case: Case
    rounds: dict[str, list[Figures]] = field(factory=dict)
    problems: dict[str, str] = field(factory=dict)

    def summaries(self) -> dict[str, Figures]:
        """Summarise each side that was measured: the least minimum and the median of medians over its rounds."""
        return {side: _summary(rounds) for side, rounds in self.rounds.items() if rounds}

    def ratios(self, sides: Sequence[str]) -> dict[str, float]:
        """The first side's figures over the second's; none unless both were measured."""
        figures = self.summaries()
        if len(sides) != 2 or any(side not in figures for side in sides):
            return {}
        first, second = (figures[side] for side in sides)
        return {name: round(getattr(first, name) / getattr(second, name), 3) for name in _RATIOS}

    def reached(self, sides: Sequence[str]) -> bool | None:
        """Tell whether the goals of the case are reached; ``None`` while that cannot be said, or there are none."""
        verdicts = []
        ratios, figures = self.ratios(sides), self.summaries().get(sides[0])
        if self.case.goal is not None and len(sides) == 2:
            if not ratios:
                return None
            verdicts.append(ratios["min_ms"] <= self.case.goal)
        if self.case.max_collectives is not None and figures is not None and figures.collectives is not None:
            verdicts.append(figures.collectives <= self.case.max_collectives)
        return all(verdicts) if verdicts else None


def _summary(rounds: Sequence[Figures]) -> Figures:
    return Figures(
        min_ms=min(figures.min_ms for figures in rounds),
        median_ms=round(median(figures.median_ms for figures in rounds), 3),
        collectives=rounds[-1].collectives,
    )


@define(eq=False)
class Suite:
    """Cases, the sides that are measured in turn, and what was measured so far.

    Args:
        cases: cases to measure.
        sides: one, or two to compare.
        rounds: number of rounds of each side and case, alternating.
    """

    cases: Sequence[Case]
    sides: Sequence[Side]
    rounds: int = 1
    outcomes: list[Outcome] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.outcomes = [Outcome(case) for case in self.cases]

    @property
    def side_names(self) -> list[str]:
        """The sides, the first beside the second."""
        return [side.name for side in self.sides]

    @property
    def num_measurements(self) -> int:
        """Number of rounds of all sides and cases."""
        return len(self.cases) * len(self.sides) * self.rounds

    def run(self, *, keep_going: bool) -> Iterator[str]:
        """Measure; gives a line after each round of a side, when what was measured so far can be saved.

        Args:
            keep_going: a side that fails in a case is noted there, and the rest goes on.

        Raises:
            ShardwrightError: a side failed, and ``keep_going`` is not set.
        """
        for outcome in self.outcomes:
            for number in range(self.rounds):
                for side in self.sides:
                    yield f"{outcome.case.name}, round {number + 1}, {self._measure(outcome, side, keep_going)}"

    def _measure(self, outcome: Outcome, side: Side, keep_going: bool) -> str:
        if side.name in outcome.problems:
            return f"{side.name}: failed before"
        try:
            figures = side.measure(outcome.case.settings)
        except ShardwrightError as error:
            if not keep_going:
                raise
            outcome.problems[side.name] = last_line(str(error))
            return f"{side.name}: failed"
        outcome.rounds.setdefault(side.name, []).append(figures)
        return f"{side.name}: {figures.min_ms:.2f} ms"

    def to_data(self) -> list[dict[str, Any]]:
        """Return JSON data, one object a case, with every round."""
        return [_case_data(outcome, self.side_names) for outcome in self.outcomes]


def _case_data(outcome: Outcome, sides: Sequence[str]) -> dict[str, Any]:
    case, ratio = outcome.case, outcome.ratios(sides)
    data: dict[str, Any] = {
        "case": case.name,
        "settings": case.settings.options(),
        "rounds": max((len(rounds) for rounds in outcome.rounds.values()), default=0),
        **{side: _figures_data(figures) for side, figures in outcome.summaries().items()},
    }
    if ratio:
        data["ratio"] = ratio
    if case.goal is not None:
        data["goal"] = case.goal
    if case.max_collectives is not None:
        data["max_collectives"] = case.max_collectives
    if outcome.problems:
        data["problems"] = outcome.problems
    data["every_round"] = {
        side: [_figures_data(figures) for figures in rounds] for side, rounds in outcome.rounds.items()
    }
    return data


def _figures_data(figures: Figures) -> dict[str, Any]:
    return {"min_ms": figures.min_ms, "median_ms": figures.median_ms, "collectives": figures.collectives}


def last_line(text: str) -> str:
    """The last line that says something: of a traceback, the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def each_type(settings: StepSettings, types: Sequence[str]) -> list[Case]:
    """Make cases of the same work by each sharding type alone."""
    return [Case(name, evolve(settings, types=(name,))) for name in types]


def write_json(path: Path, data: Any) -> None:
    """Write a file at once, so that one that is there is whole."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(partial, path)


def run_to_the_end(suite: Suite, *, keep_going: bool, after_each: Callable[[str], None]) -> bool:
    """Run a suite; an interrupt ends it early, with what was measured until then.

    Returns:
        Whether it came to its end.
    """
    try:
        for note in suite.run(keep_going=keep_going):
            after_each(note)
    except KeyboardInterrupt:
        return False
    finally:
        for side in suite.sides:
            side.close()
    return True
