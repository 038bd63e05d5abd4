"""Planning that takes long, shown as it goes: one line with the best value, the bound and the gap."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from shardwright.planning.watch import Progress, Watch

AFTER_S = 1.0
"""Planning that ends earlier shows nothing."""


@contextmanager
def shown(watch: Watch, *, is_wanted: bool | None = None, after_s: float = AFTER_S) -> Iterator[None]:
    """Show a watch's progress on standard error while this lasts, once that is longer than a moment.

    Args:
        watch: watch of the search.
        is_wanted: ``None``: if standard error is a terminal.
        after_s: the moment.
    """
    if not (sys.stderr.isatty() if is_wanted is None else is_wanted):
        yield
        return
    live: list[Any] = []

    def show() -> None:
        from rich.console import Console
        from rich.live import Live

        live.append(
            Live(
                console=Console(stderr=True),
                get_renderable=partial(_line, watch),
                refresh_per_second=4,
                transient=True,
            )
        )
        live[0].start(refresh=True)

    timer = threading.Timer(after_s, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for one in live:
            one.stop()


def _line(watch: Watch) -> Any:
    from rich.text import Text

    told = progress_text(watch.progress, was_interrupted=watch.was_interrupted)
    return Text(told, no_wrap=True, overflow="ellipsis")


def progress_text(progress: Progress, *, was_interrupted: bool = False) -> str:
    """``planning, 3.2 s: best 14.76 ms, bound 14.7 ms, gap 0.4 %; Ctrl-C takes the best so far``."""
    best = f"best {progress.value_ms:.4g} ms" if math.isfinite(progress.value_ms) else "no plan yet"
    bound = f", bound {progress.lower_bound_ms:.4g} ms" if progress.lower_bound_ms > 0 else ""
    gap = f", gap {progress.gap:.2%}" if math.isfinite(progress.gap) else ""
    end = "ending" if was_interrupted else "Ctrl-C takes the best so far"
    return f"planning, {progress.seconds:.1f} s: {best}{bound}{gap}; {end}"
