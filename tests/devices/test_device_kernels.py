"""The report's speeds of kernels beside the bandwidth of memory."""

from __future__ import annotations

import pytest
import torch
from tests.benchmarks.gpu_report.device_kernels import copy_bandwidth, main, measure
from tests.benchmarks.lookup import Work

from shardwright.errors import UnsupportedError

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


def test_device_that_is_not_there_is_refused() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(UnsupportedError):
        main(["fused_torch"])


@pytest.mark.gpu
def test_kernels_on_cuda_are_compared_with_copies(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fused_triton"], steps=3)
    assert "fused_triton" in capsys.readouterr().out
