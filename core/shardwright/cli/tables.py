"""Tables and texts on a terminal, and in a pipe."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 2000
PAGE_WIDTH = 100
"""Columns of what is read rather than searched, in a pipe."""


def console() -> Console:
    """A console as wide as the terminal; a pipe has no width: there, a row is a line."""
    return _console(None if sys.stdout.isatty() else _PIPE_WIDTH)


def page() -> Console:
    """A console as wide as the terminal, or as ``COLUMNS`` says, or as a page."""
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return _console(None if has_width else PAGE_WIDTH)


def flowing(text: str) -> str:
    """A docstring with one line a paragraph, which fills any width; lines that are indented stay lines."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _console(width: int | None) -> Console:
    """A console that prints names as they are: ``[bold]`` or ``:cat:`` in one is no markup."""
    from rich.console import Console

    return Console(width=width, markup=False, emoji=False)
