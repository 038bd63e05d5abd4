"""Whether another process of this host has ended."""

from __future__ import annotations

import subprocess
import sys
import time

from tests import stranger

from shardwright.runtime.ranks.group_store import has_ended

AT_EXIT = """
import atexit, os
from shardwright.runtime.ranks.group_store import has_ended

atexit.register(lambda: print(has_ended(parent)))
parent = os.getppid()
"""


def test_process_has_ended_once_it_has() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not has_ended(process.pid)
        process.communicate(b"\n")
        assert has_ended(process.pid)


def test_process_that_was_killed_has_ended_though_nobody_has_waited_for_it() -> None:
    with subprocess.Popen(["sleep", "infinity"]) as process:
        process.kill()
        deadline = time.monotonic() + 60
        while not has_ended(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.returncode is None
        assert has_ended(process.pid)


def test_process_that_runs_has_not_ended_for_one_whose_interpreter_ends() -> None:
    """Threads look at others until the very end: a rank that failed took its parent for gone, and removed its error."""
    assert stranger.run_python("-c", AT_EXIT).stdout == "False\n"
