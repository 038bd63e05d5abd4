"""Commands that train on a device, as a user calls them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.gpu
def test_demo_on_cuda_prints_its_throughput() -> None:
    command = [
        sys.executable,
        "-m",
        "shardwright",
        "demo",
        "--device",
        "cuda",
        "--ranks",
        "1",
        "--steps",
        "50",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "examples/s on 1 rank" in done.stdout
