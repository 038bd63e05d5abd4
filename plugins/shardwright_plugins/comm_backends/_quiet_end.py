"""The end of a process: gloo's threads let go of tensors before the interpreter is taken down.

A thread of gloo's (``ProcessGroupGloo::runLoop`` of torch) drops the tensors of a collective after the wait for it has
returned, and takes the interpreter's lock for each tensor that Python knows. Once the interpreter is being finalised,
CPython ends every thread that asks for the lock (see ``PyEval_RestoreThread`` in "Initialization, Finalization, and
Threads" of its C API), here inside a destructor of C++, which aborts the process: "terminate called without an active
exception". ``destroy_process_group`` joins these threads only if nothing else holds the group, and
``DistributedDataParallel`` does.
"""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

_THREAD = "pt_gloo_runloop"  # as torch names them
_TASKS = Path("/proc/self/task")  # of Linux; elsewhere nothing is known of other threads
# Longer than CPython's switch interval (5 ms): whoever waits for the interpreter's lock wakes up in that time.
_POLL_S = 0.006
_LONGEST_S = 3.0


@cache
def let_go_at_end() -> None:
    """Have this process end with :func:`let_go`."""
    atexit.register(let_go)


def let_go(longest_s: float = _LONGEST_S) -> None:
    """Wait until gloo's threads rest, at most ``longest_s`` seconds."""
    deadline = time.monotonic() + longest_s
    before, now = None, _states()
    while now and now != before and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # without the interpreter's lock, which they may want
        are_asleep = all("S (sleeping)" in lines[0] for lines in now.values())
        before, now = now if are_asleep else None, _states()


def _states() -> dict[str, list[str]]:
    """State of each of gloo's threads: if it runs, and the counts of its context switches."""
    found = {}
    for task in _TASKS.glob("*"):
        try:
            if (task / "comm").read_text().strip() == _THREAD:
                lines = (task / "status").read_text().splitlines()
                found[task.name] = [
                    line for line in lines if line.startswith("State") or "ctxt_switches" in line
                ]
        except OSError:  # it has just ended
            continue
    return found
