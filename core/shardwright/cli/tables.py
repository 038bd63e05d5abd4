"""Tables on a terminal, and in a pipe."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 2000
PAGE_WIDTH = 100
"""Columns of what is read rather than searched."""


def console(pipe_width: int = _PIPE_WIDTH) -> Console:
    """A console as wide as the terminal, or as ``COLUMNS`` says.

    Args:
        pipe_width: columns in a pipe, which has no width of its own; by default so many that a row is a line.
    """
    from rich.console import Console

    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Console(width=None if has_width else pipe_width)
