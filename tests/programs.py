"""Python programs that tests run in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def printed_by(*arguments: object, python: str = sys.executable, **options: Any) -> str:
    """What a program prints, which must end well; all that it wrote is told if not.

    Args:
        arguments: the arguments of Python: a script, or ``-c`` or ``-m`` and what follows.
        python: the interpreter.
        options: of :func:`subprocess.run`.
    """
    done = subprocess.run([python, *map(str, arguments)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
