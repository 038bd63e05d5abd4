"""The scripts of tests/benchmarks, on tiny steps, beside a stand-in for a peer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from tests.benchmarks import step_ratios
from tests.benchmarks.steps import timed_step
from tests.benchmarks.steps.timed_step import StepSettings, bench_batch, bench_model, measured

from shardwright import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    InvalidInputError,
    RowWiseAdagrad,
    UnsupportedError,
)

pytestmark = pytest.mark.distributed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--batch", "4", "--tables", "3", "--rows", "20", "--dim", "8", "--ids", "2", "--steps", "3"]


def run_step(*options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(BENCHMARKS / "steps" / "step.py"), *options, *TINY]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.slow
def test_step_prints_least_time_and_collectives() -> None:
    done = run_step("--types", "row_wise")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert 0 < figures["min_ms"] <= figures["median_ms"]
    assert figures["collectives"] == 4


def test_figures_of_a_program_that_fails_are_its_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        step_ratios.figures_of([sys.executable, str(tmp_path / "missing.py")])
    assert "exit code 2" in str(caught.value)


@pytest.mark.slow
def test_step_ratios_beside_another_program_prints_ratios_and_keeps_them(tmp_path: Path) -> None:
    peer, kept = tmp_path / "peer.py", tmp_path / "kept.json"
    peer.write_text('print(\'{"min_ms": 1000.0, "median_ms": 1000.0, "collectives": 5}\')')
    options = ["--beside", f"{sys.executable} {peer}", "--json", str(kept)]
    options += ["--rounds", "1", "--steps", "2", "--only", "table_wise, batch 64"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "step_ratios.py"), *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(kept.read_text())
    (of_table,) = [
        known for known in step_ratios.BESIDE if known.name == "table_wise, batch 64, 24 x 10k x 16, 2 ids"
    ]
    assert case["goal"] == of_table.goal
    assert case["shardwright"]["collectives"] == case["max_collectives"] == 4
    assert case["ratio"]["min_ms"] == pytest.approx(case["shardwright"]["min_ms"] / 1000, abs=1e-3)


@pytest.mark.slow
def test_lookup_runs_and_prints_json() -> None:
    pytest.importorskip("fbgemm_gpu", reason="it measures beside FBGEMM")
    sizes = ["--rows", "50", "--batch", "4", "--tables", "2", "--steps", "1", "--rounds", "1"]
    command = [sys.executable, str(BENCHMARKS / "lookup.py"), *sizes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["sides"]) >= 2


STEP = StepSettings(("table_wise", "row_wise"), ranks=1, batch=4, tables=3, rows=20, dim=8, ids=2, steps=1)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "sees no device of type 'cuda' here"), (1, r"sees 1 of type 'cuda' here: give --ranks 1")],
)
def test_ranks_without_a_device_each_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch, count: int, told: str
) -> None:
    monkeypatch.setattr(timed_step, "has_accelerator", lambda _: count > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    with pytest.raises(UnsupportedError, match=told):
        measured(evolve(STEP, ranks=2, device="cuda"))


@pytest.mark.gpu
def test_step_on_cuda_times_a_kernel() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    figures = measured(evolve(STEP, device="cuda", kernel="fused_triton", dim=16))
    assert figures["min_ms"] > 0
    assert figures["collectives"]


@pytest.mark.usefixtures("group_of_one")
def test_bench_model_takes_the_step_of_the_unsharded_module_with_row_wise_adagrad() -> None:
    sharded = bench_model(STEP)
    configs = [
        EmbeddingBagConfig(20, 8, name=f"t{index}", feature_names=[f"f_t{index}"]) for index in range(3)
    ]
    unsharded = EmbeddingBagCollection(configs)
    unsharded.load_state_dict(sharded.full_state_dict())
    optimizer = RowWiseAdagrad(unsharded.parameters(), lr=0.02, eps=1e-8)
    gradient = torch.rand(STEP.batch, 3 * STEP.dim)
    for number in range(2):
        batch = bench_batch(STEP, number)
        assert batch.lengths().tolist() == [STEP.ids] * 3 * STEP.batch
        for module in (sharded, unsharded):
            module(batch).values().backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(sharded.full_state_dict(), unsharded.state_dict())
