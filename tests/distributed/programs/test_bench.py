"""The scripts of tests/benchmarks, on tiny steps, beside a stand-in for a peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.benchmarks import step_ratios

from shardwright.errors import InvalidInputError

pytestmark = pytest.mark.distributed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--batch", "4", "--tables", "3", "--rows", "20", "--dim", "8", "--ids", "2", "--steps", "3"]


def step(*options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(BENCHMARKS / "steps" / "step.py"), *options, *TINY]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.slow
def test_step_prints_least_time_and_collectives() -> None:
    done = step("--types", "row_wise")
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
