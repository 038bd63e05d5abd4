"""Tables on a terminal, and in a pipe, where a row is a line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 2000


def console() -> Console:
    """A console as wide as the terminal; a pipe has no width: there, nothing is folded.

    Names are printed as they are: `[bold]` or `:cat:` in one is no markup.
    """
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, markup=False, emoji=False)
