"""A process may end at once after a collective, whatever gloo's threads still hold."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
from tests.programs import printed_by

from shardwright_plugins.comm_backends import _quiet_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of other threads")

# A thread of gloo's takes the interpreter's lock for each of these tensors after the wait. By the switch interval it
# never gets it from this thread while that computes.
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import shardwright as sw

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
env = sw.ShardingEnv.from_process_group()  # holds the group, as DistributedDataParallel does
sys.setswitchinterval(1000)
work = dist.all_reduce_coalesced([torch.ones(1) for _ in range(5000)], async_op=True)
work.wait()
del work
dist.destroy_process_group()
print("all done")
"""


def test_process_that_ends_right_after_a_collective_ends_well() -> None:
    assert printed_by("-W", "ignore", "-c", SCRIPT) == "all done\n"


@pytest.fixture
def spinning():
    """A thread that is called like one of gloo's and computes, without the interpreter's lock most of the time."""
    stop = threading.Event()

    def spin() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        started.set()
        while not stop.is_set():
            time.sleep(0.001)

    started = threading.Event()
    thread = threading.Thread(target=spin)
    thread.start()
    assert started.wait(60)
    yield stop
    stop.set()
    thread.join(60)


def test_let_go_waits_for_a_busy_thread_only_so_long(spinning) -> None:
    begin = time.monotonic()
    _quiet_end.let_go(longest_s=0.2)
    assert time.monotonic() - begin >= 0.2


def test_let_go_goes_on_when_the_thread_has_ended(spinning) -> None:
    threading.Timer(0.2, spinning.set).start()
    _quiet_end.let_go(longest_s=60)
    assert spinning.is_set()
