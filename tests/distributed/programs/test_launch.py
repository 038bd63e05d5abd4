"""Ranks that a script or a notebook starts."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests import stranger

import shardwright as sw
from shardwright_plugins.launch import launch

pytestmark = pytest.mark.distributed

WAIT_S = 120.0
# Like a cell of a notebook: `__main__` has no file, and no guard keeps it from running twice.
PROGRAM = """
import atexit
import os

import torch
import torch.distributed as dist
import shardwright as sw
from shardwright_plugins.launch import launch

SCALE = 10.0

class Sum:
    def __init__(self, value):
        self.value = value

def add(start):
    dist.init_process_group("gloo")
    total = torch.tensor(start + SCALE * dist.get_rank())
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()};", end="")  # in one write
    atexit.register(os.abort)  # as threads of torch's may do while an interpreter ends
    return dist.get_rank(), Sum(total)

(first, _), (second, total) = launch(add, 1.0, ranks=2)
assert (first, second) == (0, 1)
assert type(total) is Sum
assert total.value == 12.0

def fail():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("what went wrong")
    dist.barrier()  # fails too, since rank 1 is gone

try:
    launch(fail, ranks=2)
except sw.DistributedError as error:
    text = str(error)
    assert text.startswith("rank 1 of 2")
    assert text.index("in fail") < text.index("ValueError: what went wrong")
else:
    raise AssertionError("no error")
"""


@pytest.mark.parametrize("kind", ["notebook", pytest.param("script", marks=pytest.mark.slow)])
def test_launch_returns_results_by_rank_and_raises_the_error_of_the_rank_that_failed_first(
    kind: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    arguments = ["-c", PROGRAM] if kind == "notebook" else [str(script)]
    done = stranger.run_python("-W", "error", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split(";")) == ["", "rank 0", "rank 1"]


def wait_for_pids(folder: Path, ranks: int) -> list[int]:
    deadline = time.monotonic() + WAIT_S
    while len(files := list(folder.iterdir())) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(file.name) for file in files]


def wait_for_their_end(pids: list[int]) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children() -> str:
    """Processes that this one has started."""
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()


def test_launch_that_takes_too_long_ends_the_ranks_and_leaves_signals_as_they_were() -> None:
    handler, before = signal.getsignal(signal.SIGINT), children()
    with pytest.raises(sw.DistributedError):
        launch(signal.pause, ranks=2, timeout_s=0.5)
    assert children() == before
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_launch_whose_process_is_ended_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    code = f"""
import os, pathlib, signal
from shardwright_plugins.launch import launch
signal.signal(signal.SIGINT, signal.default_int_handler)

def wait():
    pathlib.Path({str(pids)!r}, str(os.getpid())).touch()
    signal.pause()

launch(wait, ranks=2)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        ranks = wait_for_pids(pids, 2)
        process.send_signal(number)
        _, errors = process.communicate()
    wait_for_their_end(ranks)
    assert list(temporary.iterdir()) == []
    assert re.search(r"^KeyboardInterrupt$", errors, re.MULTILINE) or number == signal.SIGKILL


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan])
def test_launch_for_no_time_is_an_error(timeout_s: float) -> None:
    with pytest.raises(sw.InvalidInputError, match="timeout_s"):
        launch(print, ranks=1, timeout_s=timeout_s)


def test_launch_of_what_cannot_be_sent_or_of_no_ranks_is_an_error() -> None:
    with pytest.raises(sw.InvalidInputError, match="lock"):
        launch(print, threading.Lock(), ranks=2)
    with pytest.raises(sw.InvalidInputError, match="ranks"):
        launch(print, "1", "2", "3", ranks=0)


@pytest.mark.slow
def test_launch_names_the_rank_that_was_killed_and_not_those_that_were_ended_for_it() -> None:
    def die() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(sw.DistributedError, match="SIGKILL") as caught:
        launch(die, ranks=2)
    assert str(caught.value).startswith("rank 1 of 2")
    assert "rank 0" not in str(caught.value)


@pytest.mark.slow
def test_launch_whose_function_ends_its_process_is_an_error() -> None:
    with pytest.raises(sw.DistributedError, match=r"\[0\]"):
        launch(sys.exit, 0, ranks=1)
