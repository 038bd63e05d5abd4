"""The report of a machine with a GPU: how plugins are found without an installation, and the page it writes."""

from __future__ import annotations

import importlib.metadata
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.benchmarks.gpu_report import recorder
from tests.benchmarks.gpu_report.markdown import page_of
from tests.benchmarks.gpu_report.programs import Runner, write_metadata
from tests.benchmarks.gpu_report.sections import ALONE, files_with_gpu_tests


def test_metadata_of_the_source_has_the_entry_points_of_an_installation(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    installed = importlib.metadata.entry_points(group="shardwright")
    own = {(point.name, point.value) for point in found.entry_points if point.group == "shardwright"}
    assert own <= {(point.name, point.value) for point in installed}
    assert ("builtin_compute_kernels", "shardwright_plugins.compute_kernels") in own


def test_program_is_ended_with_the_processes_that_it_started(tmp_path: Path) -> None:
    """Workers of pytest and ranks hold the pipes that the report reads: it would wait for them."""
    inner = "import time; time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    runner = Runner(tmp_path, time.monotonic() + 600)
    done = runner.run("-c", outer, limit_s=1.5)
    assert done.code is None
    assert done.problem.startswith("not ended after")
    assert runner.run("-c", "raise SystemExit('no')", limit_s=60.0).problem == "exit code 1: no"


def outcome(**changes: Any) -> SimpleNamespace:
    values = {
        "when": "call",
        "outcome": "passed",
        "nodeid": "tests/a.py::test_b",
        "duration": 1.234,
        "longrepr": None,
        "user_properties": [("peak MiB", 3.0)],
    }
    return SimpleNamespace(**{**values, **changes})


def test_recorder_writes_each_outcome_once_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(recorder.VARIABLE, str(tmp_path / "outcomes"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    recorder.pytest_runtest_logreport(outcome(when="setup"))
    recorder.pytest_runtest_logreport(outcome())
    skipped = outcome(when="setup", outcome="skipped", longrepr=("a.py", 3, "Skipped: no FBGEMM"))
    recorder.pytest_runtest_logreport(skipped)
    recorder.pytest_runtest_logreport(outcome(outcome="failed", longrepr="def test():\nE   assert 1 == 2\n"))
    found = [json.loads(line) for line in (tmp_path / "outcomes").read_text().splitlines()]
    assert [one["outcome"] for one in found] == ["passed", "skipped", "failed"]
    assert [one["reason"] for one in found] == ["", "no FBGEMM", "assert 1 == 2"]
    assert found[0]["figures"] == {"peak MiB": 3.0}


def test_page_tells_what_ran_what_did_not_and_which_goals_are_missed() -> None:
    case = {"tables": 24, "rows": 1_000_000, "dim": 128, "batch": 8192, "ids": 20}
    kernel = {"kernel": "fused_triton", "lookup_ms": 1.5, "update_ms": 4.0}
    goals = {"fused_triton": {"lookup": 0.85, "update": 0.5, "met": False}}
    step = {"min_ms": 2.5}
    test = {"seconds": 1.0, "reason": "", "figures": {}}
    page = page_of(
        {
            "device": "NVIDIA H100",
            "seconds": 400.0,
            "note": "",
            "missing": ["highspy"],
            "sections": {
                "kernels": {
                    "fused_triton": {
                        "figures": {"copy_gb_s": 2900.0, "cases": [{**case, "kernels": [kernel]}]},
                        "goals": goals,
                    },
                    "fused": {"problem": "exit code 2: no such kernel"},
                },
                "steps": {
                    "a step": {"figures": step, "problem": ""},
                    "another": {"figures": None, "problem": "exit code 1: no"},
                },
                "demo": {"speed": "speed: 9 examples/s", "problem": ""},
            },
            "tests": {
                "tests": [
                    {**test, "name": "t::a", "outcome": "passed", "figures": {"peak MiB": 3}},
                    {**test, "name": "t::b", "outcome": "not run", "reason": "time was up"},
                ],
                "runs": [{"command": "pytest", "problem": "not ended after 330 s"}],
            },
        }
    )
    for text in (
        "NVIDIA H100",
        "highspy",
        "copies: 2900 GB/s",
        "| 1.500 | 4.000 | 85% / 50% | missed |",
        "exit code 2: no such kernel",
        "| a step | 2.5 |  |",
        "exit code 1: no",
        "speed: 9 examples/s",
        "1 not run, 1 passed",
        "peak MiB 3",
        "time was up",
        "not ended after",
    ):
        assert text in page, text


def test_files_with_gpu_tests_are_all_found() -> None:
    files = files_with_gpu_tests()
    assert ALONE in files
    assert "tests/devices/test_simulated_ranks.py" in files
    assert "tests/plugins/compute_kernels/test_triton.py" in files
