"""``torchrun`` of a training that goes on from its checkpoints, as hosts are lost and come back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import torch
from tests.distributed.checkpoints import restart_workers
from tests.ports import own_port

from shardwright_plugins.checkpoint.folder import steps_in
from shardwright_plugins.commands.demo.rank import train_and_evaluate
from shardwright_testing.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WAIT_S = 240.0


@contextmanager
def host(
    port: int, folder: Path, log: Path, *, keeps_store: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """``torchrun`` with one rank, as on a host of its own.

    Args:
        port: Port of the store by which the hosts find each other.
        folder: Checkpoints of the training.
        log: File for what the host prints.
        keeps_store: Whether the store is on this host. Without a word the host that comes first keeps it, and the
            training ends with that host.
    """
    path = os.pathsep.join(["", *sys.path])
    # A host that is lost is missed after three seconds, and one that may come is waited for for one.
    patience = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
    patience += f",is_host={str(keeps_store).lower()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={patience}"]
    command += ["--max-restarts=3", "--monitor-interval=0.2", "--local-addr=localhost"]
    command += ["-m", restart_workers.__name__, str(folder)]
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=Path(__file__).parents[3],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        lose(process)


def lose(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of the launcher of a host and of its ranks."""
    ranks = children(process.pid)
    for pid in (process.pid, *ranks):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(timeout=10)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def wait_for_a_step_after(folder: Path, step: int, log: Path) -> int:
    """Wait for a checkpoint of a later step, and return that."""
    deadline = time.monotonic() + WAIT_S
    while (newest := max(steps_in(folder), default=0)) <= step:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return newest


def world_sizes(log: Path) -> list[int]:
    return [int(size) for size in re.findall(r"world size (\d+)", log.read_text())]


def test_training_goes_on_with_fewer_and_more_hosts_to_the_auc_of_one_that_was_not_disturbed(
    pool: RankPool, tmp_path: Path
) -> None:
    port = own_port()
    folder, log, third = tmp_path / "checkpoints", tmp_path / "first.log", tmp_path / "third.log"
    with host(port, folder, log, keeps_store=True) as first:
        with host(port, folder, tmp_path / "second.log"):
            step = wait_for_a_step_after(folder, 0, log)
        step = wait_for_a_step_after(folder, step + 20, log)  # which one rank has saved
        with host(port, folder, third) as last:
            assert first.wait(timeout=WAIT_S) == 0, log.read_text()
            last.wait(timeout=WAIT_S)  # rank 0 writes the result, on either host
    sizes = world_sizes(log)
    assert {1, 2} == set(sizes), sizes
    assert sizes[-1] == 2, sizes
    # Rank 0 tells it. It is on the host whose process has the lower number, and numbers begin anew some time.
    assert sum(own.read_text().count("resumed from") for own in (log, third)) >= 2
    result = json.loads((folder / "result.json").read_text())
    settings = attrs.evolve(restart_workers.settings(None), ranks=2)
    undisturbed, _ = pool.run(train_and_evaluate, 2, settings, torch.device("cpu"))
    assert result["steps"] == undisturbed.steps
    assert result["auc"] == pytest.approx(undisturbed.auc, abs=2e-3)
