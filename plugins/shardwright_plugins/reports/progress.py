"""Progress of planning, on a line of standard error."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size

from shardwright.planning.watch import Progress, Watch

_TO_END = "\x1b[K"  # clears a terminal's line from here on (ECMA-48, EL)


@contextmanager
def shown(watch: Watch, *, after_s: float = 1.0) -> Iterator[None]:
    """Show a watch's progress on standard error while this lasts, once that is longer than a moment.

    Args:
        watch: watch of the search.
        after_s: the moment, s; after each, the line is written anew.
    """
    screen, is_over = sys.stderr, threading.Event()

    def show() -> None:
        text = ""
        while not is_over.wait(after_s):
            text = progress_text(watch.progress, was_interrupted=watch.was_interrupted)
            screen.write(f"\r{text[: get_terminal_size().columns - 1]}{_TO_END}")
            screen.flush()
        if text:
            screen.write(f"\r{_TO_END}")
            screen.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def progress_text(progress: Progress, *, was_interrupted: bool = False) -> str:
    """``planning, 3.2 s: best 14.76 ms, bound 14.7 ms, gap 0.4 %; Ctrl-C takes the best so far``."""
    best = f"best {progress.value_ms:.4g} ms" if math.isfinite(progress.value_ms) else "no plan yet"
    bound = f", bound {progress.lower_bound_ms:.4g} ms" if progress.lower_bound_ms > 0 else ""
    gap = f", gap {progress.gap:.2%}" if math.isfinite(progress.gap) else ""
    end = "ending" if was_interrupted else "Ctrl-C takes the best so far"
    return f"planning, {progress.seconds:.1f} s: {best}{bound}{gap}; {end}"
