"""`shardwright bench kernels --device`: speeds beside the bandwidth of memory."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright_plugins.commands.bench.device_kernels import copy_bandwidth, measure
from shardwright_plugins.commands.bench.kernels import Work

TINY = Work(tables=2, batch=4, rows=10, dim=8, ids=3)


def test_measure_times_what_runs_and_says_why_others_do_not() -> None:
    cpu = torch.device("cpu")
    figures, reasons = measure(["fused_torch", "fused_uvm"], TINY, cpu, steps=1)
    (own,) = figures
    assert own.kernel == "fused_torch"
    # Ids, rows and results of a lookup, in bytes, are the time times the bandwidth.
    looked_up = 2 * 4 * 3 * (8 + 8 * 4) + 2 * 4 * 8 * 4
    assert own.lookup_bandwidth * own.lookup_ms / 1e3 == pytest.approx(looked_up)
    assert own.update_bandwidth > 0
    (reason,) = reasons
    assert reason.startswith("fused_uvm: ")
    assert copy_bandwidth(cpu, num_bytes=1 << 10) > 0


def test_bench_kernels_on_a_device_that_is_not_there_says_so() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    done = CliRunner().invoke(app, ["bench", "kernels", "--device", "cuda"])
    assert done.exit_code != 0
    assert "no accelerator" in str(done.exception) + done.output


@pytest.mark.gpu
def test_bench_kernels_on_cuda_compares_with_copies() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = CliRunner().invoke(app, ["bench", "kernels", "--device", "cuda", "--steps", "3"])
    assert "fused_triton" in done.output, done.output
