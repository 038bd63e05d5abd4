"""The line of a planner's progress."""

from __future__ import annotations

import io
import math
import sys
import time

import pytest

from shardwright.planning.watch import Progress, Watch
from shardwright_plugins.reports.progress import progress_text, shown


def test_shown_on_a_terminal_shows_the_best_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "200")
    watch = Watch()
    with shown(watch, after_s=0.01):
        watch.tell(value_ms=3.0, lower_bound_ms=2.0)
        deadline = time.monotonic() + 60
        while "gap 50.00%" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "best 3 ms, bound 2 ms, gap 50.00%; Ctrl-C takes the best so far" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")  # and leaves the line empty


def test_shown_on_a_narrow_terminal_stays_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "20")
    with shown(Watch(), after_s=0.01):
        deadline = time.monotonic() + 60
        while "planning" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    lines = screen.getvalue().replace("\x1b[K", "").split("\r")
    assert max(map(len, lines)) == 19


def test_shown_for_a_moment_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with shown(Watch(), after_s=60.0):
        time.sleep(0.05)
    assert screen.getvalue() == ""


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(1.25), "planning, 1.2 s: no plan yet; Ctrl-C takes the best so far"),
        (Progress(2.0, 4.0), "planning, 2.0 s: best 4 ms; Ctrl-C takes the best so far"),
        (
            Progress(2.0, math.inf, 3.0),
            "planning, 2.0 s: no plan yet, bound 3 ms; Ctrl-C takes the best so far",
        ),
    ],
)
def test_progress_text(progress: Progress, text: str) -> None:
    assert progress_text(progress) == text


def test_progress_text_after_ctrl_c() -> None:
    assert progress_text(Progress(2.0, 4.0), was_interrupted=True) == "planning, 2.0 s: best 4 ms; ending"
