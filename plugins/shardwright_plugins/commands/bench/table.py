"""A suite as a table with bars that a person can read."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from shardwright_plugins.commands.bench.sides import Figures
from shardwright_plugins.commands.bench.suite import Outcome, Suite

BAR_WIDTH = 12
FULL, LIGHT = "\u2588", "\u2591"  # full and light block
_SIDE_STYLES = ("cyan", "magenta")
_VERDICTS = {True: ("reached", "green"), False: ("missed", "red"), None: ("", "")}


def bench_table(suite: Suite) -> Table:
    """A row for each case, a line in it for each side.

    Where sides are compared, each case has a scale of its bars for itself; else all cases have one.
    """
    compared = len(suite.sides) == 2
    table = Table(title=_title(suite), caption=_caption(suite), box=box.SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = True
    table.title_justify = table.caption_justify = "left"
    table.add_column("case", overflow="fold")
    if compared:
        table.add_column("side", no_wrap=True)
    for name in ("min ms", "median"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", min_width=BAR_WIDTH)
    table.add_column("calls", justify="right", no_wrap=True)
    if compared:
        for name in ("ratio", "goal"):
            table.add_column(name, justify="right", no_wrap=True)
    scale = max((_longest(outcome) for outcome in suite.outcomes), default=0.0)
    for outcome in suite.outcomes:
        cells = _cells(outcome, suite.side_names, _longest(outcome) if compared else scale)
        table.add_row(outcome.case.name, *cells, *(_verdict(outcome, suite.side_names) if compared else ()))
        if compared:
            table.add_section()
    return table


def _title(suite: Suite) -> str:
    """The work, where all cases have it but for the sharding types."""
    works = {tuple(outcome.case.settings.options()[2:]) for outcome in suite.outcomes}
    return " ".join(next(iter(works))) if len(works) == 1 else ""


def _caption(suite: Suite) -> str:
    lines = [
        f"{FULL} the fastest step, {LIGHT} to the median; calls: collectives a step",
        f"{suite.rounds} round{'s' if suite.rounds > 1 else ''}: the least minimum, the median of medians",
    ]
    if len(suite.sides) == 2:
        lines[1] += f"; ratio: {suite.side_names[0]} / {suite.side_names[1]}, of minima"
    problems = [
        f"{outcome.case.name}, {side}: {problem}"
        for outcome in suite.outcomes
        for side, problem in outcome.problems.items()
    ]
    return "\n".join([*lines, *problems])


def _longest(outcome: Outcome) -> float:
    return max((figures.median_ms for figures in outcome.summaries().values()), default=0.0)


def _cells(outcome: Outcome, sides: Sequence[str], scale: float) -> list[Text]:
    """A cell for each column, a line in it for each side."""
    found, newline = outcome.summaries(), Text("\n")
    lines = [
        _figures(found[side], scale, style) if side in found else _missing(outcome, side)
        for side, style in zip(sides, _SIDE_STYLES, strict=False)
    ]
    names = [Text("\n".join(sides))] if len(sides) > 1 else []
    return [*names, *(newline.join(column) for column in zip(*lines, strict=True))]


def _figures(figures: Figures, scale: float, style: str) -> list[Text]:
    calls = "" if figures.collectives is None else str(figures.collectives)
    drawn = Text(bar(figures.min_ms, figures.median_ms, scale), style, no_wrap=True)
    return [Text(f"{figures.min_ms:.2f}"), Text(f"{figures.median_ms:.2f}"), drawn, Text(calls)]


def _missing(outcome: Outcome, side: str) -> list[Text]:
    return [
        Text("-"),
        Text("-"),
        Text("failed" if side in outcome.problems else "not measured", "red"),
        Text(""),
    ]


def _verdict(outcome: Outcome, sides: Sequence[str]) -> list[Text]:
    """Ratio and goal, and below them whether it is reached."""
    ratios, goal = outcome.ratios(sides), outcome.case.goal
    word, style = _VERDICTS[outcome.reached(sides)]
    asked = Text("" if goal is None else f"\u2264 {goal:.2f}")
    return [Text(f"{ratios['min_ms']:.2f}" if ratios else ""), Text("\n").join([asked, Text(word, style)])]


def bar(minimum: float, median: float, longest: float) -> str:
    """A bar to ``minimum``, light from there to ``median``; ``longest`` fills the width."""
    if longest <= 0.0:
        return ""
    full, stop = (max(1, round(BAR_WIDTH * min(value, longest) / longest)) for value in (minimum, median))
    return FULL * min(full, stop) + LIGHT * max(0, stop - full)
