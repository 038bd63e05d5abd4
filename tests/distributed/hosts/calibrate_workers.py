"""What ranks of the tests of calibrations do: hosts are told apart by the launcher's variable alone."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch.distributed as dist
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright_plugins.commands.calibrate import kernels, links, running, steps

SLOWER = 3.0
_CASES = (kernels.KernelCase(2, 50, 8, 16, 2), kernels.KernelCase(1, 80, 16, 8, 3))


def calibrate(path: str, local_world_size: int, *words: str) -> tuple[int, str]:
    """Calibrate with a few small experiments; the exit code and what is printed."""
    few = [steps.StepCase(["table_wise"], 4, 4, 60, 8, 2), steps.StepCase(["table_wise"], 8, 4, 60, 8, 2)]
    asked = ["calibrate", "--output", path, "--kernel", "fused_torch", *words]
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(local_world_size)}),
        mock.patch.object(kernels, "CASES", _CASES),
        mock.patch.object(steps, "cases", return_value=few),
        mock.patch.object(links, "_SIZES", (8, 1 << 12, 1 << 15)),
        mock.patch.object(running, "REFERENCE_ROUNDS", 2),  # its time tells nothing here
        mock.patch.object(kernels, "_times", _times_by_host(local_world_size)),
    ):
        done = CliRunner().invoke(app, asked)
    return done.exit_code, done.output + str(done.exception or "")


def _times_by_host(local_world_size: int) -> Any:
    """Times of kernels that are known; those of the second host are longer."""

    def times(lookup: Any, case: kernels.KernelCase, *_: Any) -> tuple[float, float]:
        slower = SLOWER if dist.get_rank() // local_world_size else 1.0
        return slower * 0.001 * case.bags, slower * 0.002 * case.bags

    return times
