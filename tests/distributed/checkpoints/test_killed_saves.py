"""kill -9 in the midst of saves, at random moments: the newest complete checkpoint loads, each time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.checkpoints.checkpoint_victims import WAYS, strike

import shardwright as sw
from shardwright.errors import CheckpointError
from shardwright_plugins.checkpoint.folder import steps_in

pytestmark = pytest.mark.distributed


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_killed_while_saving_leaves_the_newest_complete_checkpoint(how: str, tmp_path: Path) -> None:
    drawn = random.Random(how)
    found = [strike(how, tmp_path / str(number), drawn) for number in range(5)]
    if how == "removing":
        assert any("removing" in each.struck for each in found), found


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
