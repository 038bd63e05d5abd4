"""`shardwright bench step` on a tiny step, alone and beside a program that stands for a peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

TINY = ["--batch", "4", "--tables", "3", "--rows", "20", "--dim", "8", "--ids", "2", "--steps", "3"]
PEER = """
import json, sys
assert sys.argv[1:5] == ["--types", "row_wise", "--ranks", "2"], sys.argv
print(json.dumps({"min_ms": 2.0, "median_ms": 4.0, "collectives": 9}))
"""


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwright", "bench", "step", *options, *TINY],
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_bench_step_beside_another_program_prints_both_sides_and_ratios(tmp_path: Path) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    done = bench("--types", "row_wise", "--beside", f"{sys.executable} {peer}", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["beside"] == {"min_ms": 2.0, "median_ms": 4.0, "collectives": 9}
    assert result["shardwright"]["collectives"] == 4
    assert result["ratio"]["min_ms"] == pytest.approx(result["shardwright"]["min_ms"] / 2.0, abs=1e-3)


def test_bench_step_unknown_type_names_the_nearest() -> None:
    done = bench("--types", "row_wize")
    assert done.returncode == 1
    assert "Did you mean 'row_wise'?" in done.stderr


def test_bench_step_other_program_that_fails_is_told(tmp_path: Path) -> None:
    done = bench("--types", "row_wise", "--beside", f"{sys.executable} {tmp_path / 'missing.py'}")
    assert done.returncode == 1
    assert "missing.py" in done.stderr
    assert "exit code 2" in done.stderr
