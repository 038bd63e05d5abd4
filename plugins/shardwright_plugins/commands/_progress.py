"""Progress of a command: bars on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Tracker", "track"]

_SECONDS_BETWEEN_LINES = 5.0


class Tracker(Protocol):
    """Is told of each step that is done."""

    def advance(self, note: str = "") -> None:
        """One step more; `note` stands beside it."""


class _Silent:
    def advance(self, note: str = "") -> None:
        pass


class _Bar:
    def __init__(self, progress: Progress, what: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=total, note="")

    def advance(self, note: str = "") -> None:
        self._progress.update(self._task, advance=1, note=note)


class _Lines:
    def __init__(self, console: Console, what: str, total: int | None) -> None:
        self._console = console
        self._what = what
        self._total = total
        self._done = 0
        self._next_at = time.monotonic()

    def advance(self, note: str = "") -> None:
        self._done += 1
        if self._done == self._total or time.monotonic() >= self._next_at:
            of_total = f"/{self._total}" if self._total else ""
            self._console.print(f"{self._what} {self._done}{of_total} {note}".rstrip())
            self._next_at = time.monotonic() + _SECONDS_BETWEEN_LINES


@contextmanager
def track(console: Console | None, what: str, total: int | None) -> Iterator[Tracker]:
    """Show the progress of a loop while the `with` block runs.

    Args:
        console: Where; nowhere if None, as on all ranks but one.
        what: What the steps do.
        total: How many steps there will be, if that is known.
    """
    if console is None:
        yield _Silent()
    elif not console.is_terminal:
        yield _Lines(console, what, total)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as progress:
            yield _Bar(progress, what, total)
