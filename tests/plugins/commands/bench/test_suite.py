"""Suites of measurements: sides in turn, goals, failures, interrupts; and the table that shows them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from attrs import evolve, field, frozen
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from shardwright.errors import InvalidInputError
from shardwright.host import host
from shardwright_plugins.commands.bench import command
from shardwright_plugins.commands.bench.command import bench, run_suite
from shardwright_plugins.commands.bench.sides import Figures, Side
from shardwright_plugins.commands.bench.step import StepSettings
from shardwright_plugins.commands.bench.suite import Case, Suite, each_type
from shardwright_plugins.commands.bench.table import BAR_WIDTH, FULL, LIGHT, bar, bench_table

SETTINGS = StepSettings(("a",), ranks=2, batch=4, tables=3, rows=20, dim=8, ids=2, steps=3)


@frozen
class Scripted(Side):
    """Gives what it was told, in turn, and notes in a log shared with others when it was asked."""

    name: str
    script: list[Figures | BaseException]
    log: list[str] = field(factory=list)

    def measure(self, settings: StepSettings) -> Figures:
        self.log.append(f"{self.name} {','.join(settings.types)}")
        said = self.script.pop(0)
        if isinstance(said, BaseException):
            raise said
        return said


def figures(*minima: float, collectives: int | None = 4) -> list[Figures | BaseException]:
    return [Figures(least, 2 * least, collectives) for least in minima]


def suite_of(
    *scripts: list[Figures | BaseException], cases: int = 1, rounds: int = 1, goal: float | None = None
) -> tuple[Suite, list[str]]:
    log: list[str] = []
    sides = [Scripted(name, script, log) for name, script in zip(("ours", "theirs"), scripts, strict=False)]
    named = [Case(f"case {i}", evolve(SETTINGS, types=(f"t{i}",)), goal) for i in range(cases)]
    return Suite(named, sides, rounds), log


def shown(suite: Suite, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(bench_table(suite))
    return console.file.getvalue()


def test_suite_runs_both_sides_in_turn_case_after_case() -> None:
    suite, log = suite_of(figures(1, 2, 3, 4), figures(5, 6, 7, 8), cases=2, rounds=2)
    assert len(list(suite.run(keep_going=False))) == suite.num_measurements == 8
    assert log == ["ours t0", "theirs t0"] * 2 + ["ours t1", "theirs t1"] * 2


def test_suite_summary_is_the_least_minimum_and_the_median_of_medians() -> None:
    suite, _ = suite_of(figures(3, 1, 2), figures(8, 4, 5), rounds=3)
    list(suite.run(keep_going=False))
    (outcome,) = suite.outcomes
    assert outcome.summaries() == {"ours": Figures(1, 4, 4), "theirs": Figures(4, 10, 4)}
    assert outcome.ratios(["ours", "theirs"]) == {"min_ms": 0.25, "median_ms": 0.4}


@pytest.mark.parametrize(
    ("goal", "most", "reached"),
    [(0.5, None, True), (0.4, None, False), (None, 4, True), (0.5, 3, False), (None, None, None)],
)
def test_outcome_reaches_its_goals_only_if_all_are(
    goal: float | None, most: int | None, reached: bool | None
) -> None:
    suite, _ = suite_of(figures(1), figures(2), goal=goal)
    suite.outcomes[0].case = evolve(suite.outcomes[0].case, max_collectives=most)
    list(suite.run(keep_going=False))
    assert suite.outcomes[0].reached(suite.side_names) is reached


def test_suite_that_keeps_going_notes_a_failure_and_asks_that_side_no_more_in_that_case() -> None:
    failure = InvalidInputError("Traceback:\n  somewhere\nInvalidInputError: refused on CPU\n")
    suite, log = suite_of([failure, *figures(1, 2)], figures(3, 4, 5, 6), cases=2, rounds=2)
    list(suite.run(keep_going=True))
    assert log.count("ours t0") == 1
    assert suite.outcomes[0].problems == {"ours": "InvalidInputError: refused on CPU"}
    assert set(suite.outcomes[0].summaries()) == {"theirs"}
    assert suite.outcomes[1].summaries()["ours"].min_ms == 1
    text = shown(suite)
    assert "case 0, ours: InvalidInputError: refused on CPU" in text


def test_outcome_whose_ratio_is_not_known_reaches_nothing() -> None:
    suite, _ = suite_of(figures(1), [InvalidInputError("no")], goal=0.5)
    suite.outcomes[0].case = evolve(suite.outcomes[0].case, max_collectives=4)
    list(suite.run(keep_going=True))
    assert suite.outcomes[0].reached(suite.side_names) is None


def test_suite_that_does_not_keep_going_raises() -> None:
    suite, _ = suite_of([InvalidInputError("no")])
    with pytest.raises(InvalidInputError, match="no"):
        list(suite.run(keep_going=False))


def test_run_suite_interrupted_shows_and_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, _ = suite_of([*figures(1), KeyboardInterrupt()], figures(2), cases=2)
    with pytest.raises(typer.Exit) as raised:
        run_suite(suite, json=False, keep_going=True, path=tmp_path / "kept.json")
    assert raised.value.exit_code == 130
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept[0]["ratio"] == {"min_ms": 0.5, "median_ms": 0.5}
    assert [own["rounds"] for own in kept] == [1, 0]
    said = capsys.readouterr()
    assert "not measured" in said.out
    assert "interrupted" in said.err


def test_run_suite_json_of_one_case_is_that_case_and_of_more_a_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for cases in (1, 2):
        suite, _ = suite_of(figures(1, 3), figures(2, 6), cases=cases)
        run_suite(suite, json=True, keep_going=False)
        told = json.loads(capsys.readouterr().out)
        first = told if cases == 1 else told["cases"][0]
        assert first["ours"] == {"min_ms": 1, "median_ms": 2, "collectives": 4}
        assert first["settings"] == evolve(SETTINGS, types=("t0",)).options()
    assert [own["case"] for own in told["cases"]] == ["case 0", "case 1"]


def test_table_says_the_ratio_the_goal_and_whether_it_is_reached() -> None:
    suite, _ = suite_of(figures(1, 9), figures(2, 10, collectives=None), cases=2, goal=0.75)
    list(suite.run(keep_going=False))
    text = shown(suite)
    assert [word in text for word in ("0.50", "0.90", "≤ 0.75", "reached", "missed")] == [True] * 5


def test_table_fits_a_narrow_terminal() -> None:
    suite, _ = suite_of(figures(100.123), figures(900.456), goal=0.75)
    list(suite.run(keep_going=False))
    text = shown(suite, width=80)
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert "reached" in text


def test_table_of_one_side_has_one_scale_for_all_cases() -> None:
    suite, _ = suite_of(figures(2, 4), cases=2)
    list(suite.run(keep_going=False))
    rows = [line for line in shown(suite).splitlines() if line.strip().startswith("case ") and FULL in line]
    full, whole = BAR_WIDTH // 2, BAR_WIDTH  # medians are twice the minima
    assert [(line.count(FULL), line.count(LIGHT)) for line in rows] == [
        (full // 2, full // 2),
        (full, whole - full),
    ]


@given(st.floats(0.01, 1e4), st.floats(0.0, 1e4), st.floats(0.0, 1e4))
def test_bar_has_the_lengths_of_its_values(minimum: float, more: float, rest: float) -> None:
    median, longest = minimum + more, minimum + more + rest
    drawn = bar(minimum, median, longest)
    assert 1 <= drawn.count(FULL) <= len(drawn) <= BAR_WIDTH
    assert abs(drawn.count(FULL) - BAR_WIDTH * minimum / longest) <= 1
    assert abs(len(drawn) - BAR_WIDTH * median / longest) <= 1
    assert drawn == FULL * drawn.count(FULL) + LIGHT * drawn.count(LIGHT)


def test_each_type_is_a_case_of_the_same_work() -> None:
    cases = each_type(SETTINGS, ["x", "y"])
    assert [case.name for case in cases] == ["x", "y"]
    assert {evolve(case.settings, types=("a",)) for case in cases} == {SETTINGS}


def test_step_settings_hosts_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="2 ranks do not divide into 3 equal hosts"):
        evolve(SETTINGS, hosts=3)


def test_step_settings_name_hosts_to_other_programs_only_if_there_are_several() -> None:
    assert "--hosts" not in SETTINGS.options()
    assert evolve(SETTINGS, hosts=2).options()[-2:] == ["--hosts", "2"]


def suite_asked_for(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Suite, dict[str, Any]]:
    """What `shardwright bench` with these words would run, and how."""
    asked: list[tuple[Suite, dict[str, Any]]] = []
    monkeypatch.setattr(command, "run_suite", lambda suite, **how: asked.append((suite, how)))
    done = CliRunner().invoke(bench, list(words))
    assert done.exit_code == 0, done.output
    return asked[0]


def test_bench_alone_times_the_default_step_of_every_type_once_and_shows_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suite, how = suite_asked_for(monkeypatch)
    step = StepSettings((), ranks=2, batch=1024, tables=24, rows=100_000, dim=64, ids=10, steps=25)
    assert suite.cases == each_type(step, host().sharding_types.names)
    assert [side.name for side in suite.sides] == ["shardwright"]
    assert suite.rounds == 1
    assert how == {"json": False, "keep_going": True}


def test_bench_step_options_are_the_settings_of_its_only_case(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--types", "x,y", "--ranks", "4", "--batch", "5", "--tables", "6", "--rows", "7", "--dim", "8"]
    words += [
        "--ids",
        "9",
        "--steps",
        "3",
        "--hosts",
        "2",
        "--rounds",
        "5",
        "--beside",
        "peer --fast",
        "--json",
    ]
    suite, how = suite_asked_for(monkeypatch, "step", *words)
    settings = StepSettings(("x", "y"), ranks=4, batch=5, tables=6, rows=7, dim=8, ids=9, steps=3, hosts=2)
    assert suite.cases == [Case("x,y", settings)]
    assert [side.name for side in suite.sides] == ["shardwright", "beside"]
    assert suite.rounds == 5
    assert how == {"json": True, "keep_going": False}
