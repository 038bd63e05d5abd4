"""kill -9 in the midst of saves, at random moments: the newest complete checkpoint loads, each time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.distributed import checkpoint_victims

import shardwright as sw
from shardwright.errors import CheckpointError
from shardwright.runtime.checkpoint.folder import steps_in

pytestmark = pytest.mark.distributed

RANKS, START_S = 2, 180.0


def start(rank: int, store: Path, folder: Path, how: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        checkpoint_victims.__name__,
        str(rank),
        str(RANKS),
        str(store),
        str(folder),
        how,
    ]
    path = os.pathsep.join(["", *sys.path])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def killed_after(delay_s: float, folder: Path, store: Path, how: str) -> None:
    """Have two ranks save, and kill both a moment after their first checkpoint."""
    victims = [start(rank, store, folder, how) for rank in range(RANKS)]
    try:
        deadline = time.monotonic() + START_S
        while not steps_in(folder):
            assert time.monotonic() < deadline, "no checkpoint was saved"
            time.sleep(0.01)
        time.sleep(delay_s)
    finally:
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.wait(timeout=10)
            assert victim.stdout is not None
            victim.stdout.close()


def assert_newest_loads(folder: Path) -> int:
    """Load it in this process: every weight is what was written in that step."""
    module = sw.EmbeddingBagCollection(
        [
            sw.EmbeddingBagConfig(
                name="t",
                num_embeddings=checkpoint_victims.ROWS,
                embedding_dim=checkpoint_victims.DIM,
                feature_names=["f"],
            )
        ],
        device="cpu",
    )
    loaded = sw.load_checkpoint(folder, module, strict=False)
    assert loaded.step == max(steps_in(folder))
    assert torch.equal(
        module.state_dict()["embedding_bags.t.weight"].unique(), torch.tensor([float(loaded.step)])
    )
    return loaded.step


def run(times: int, how: str, folder: Path) -> None:
    drawn = random.Random(times)
    for number in range(times):
        own = folder / str(number)
        killed_after(drawn.uniform(0.0, 0.4), own, folder / f"store{number}", how)
        step = assert_newest_loads(own)
        sw.save_checkpoint(
            own, torch.nn.Linear(1, 1), step=step + 1
        )  # the next job clears away what was left
        assert not [path for path in own.iterdir() if path.name.startswith((".saving", ".removing"))]


@pytest.mark.slow
def test_killed_while_saving_leaves_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    run(1, "async", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("how", ["sync", "async"])
def test_killed_fifty_times_while_saving(how: str, tmp_path: Path) -> None:
    run(50, how, tmp_path)


def test_two_jobs_cannot_save_in_one_folder(tmp_path: Path) -> None:
    script = (
        "import sys, torch, shardwright as sw; sw.save_checkpoint(sys.argv[1], torch.nn.Linear(1, 1)); "
        "print('saved', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        with pytest.raises(
            CheckpointError, match=f"process {other.pid} on .* two jobs cannot save in one folder"
        ):
            sw.save_checkpoint(tmp_path, torch.nn.Linear(1, 1))
        other.kill()
    sw.save_checkpoint(tmp_path, torch.nn.Linear(1, 1))  # its process has ended, so that the folder is free
    assert list(steps_in(tmp_path)) == [1, 2]
