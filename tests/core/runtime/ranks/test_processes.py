"""Whether another process of this host has ended."""

from __future__ import annotations

import subprocess
import sys

from tests import stranger

from shardwright.runtime.ranks.processes import Process

AT_EXIT = """
import atexit, os
from shardwright.runtime.ranks.processes import Process

atexit.register(lambda: print(parent.has_ended))
parent = Process(os.getppid())
"""


def test_process_has_ended_once_it_has() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        seen = Process(process.pid)
        assert not seen.has_ended
        process.communicate(b"\n")
        assert seen.has_ended


def test_process_that_runs_has_not_ended_for_one_whose_interpreter_ends() -> None:
    """Threads look at others until the very end: a rank that failed took its parent for gone, and removed its error."""
    assert stranger.run_python("-c", AT_EXIT).stdout == "False\n"
