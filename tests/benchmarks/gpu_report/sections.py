"""Sections of the report: each runs programs and gives data; what cannot run says why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_report.programs import ROOT, Done, Runner
from tests.benchmarks.gpu_report.recorder import VARIABLE

LOOKUP_GOAL, UPDATE_GOAL = 0.8, 0.6
"""Parts of the bandwidth of copies that lookup and update are to reach on the large case."""

ALONE = "tests/devices/test_one_device.py"
"""Tests of time and memory, which want the device for themselves."""

KERNELS = ("fused_triton", "fused_torch", "fused")
"""Kernels that are timed alone. Behind a cache the large case would take minutes."""

STEPS: Mapping[str, list[str]] = {
    "fused_triton, batch 8192, 24 x 1M x 128, 20 ids": [
        "--kernel", "fused_triton", "--batch", "8192", "--rows", "1000000", "--dim", "128", "--ids", "20",
    ],
    "fused_triton, batch 64, 26 x 100k x 64, 1 id": [
        "--kernel", "fused_triton", "--batch", "64", "--tables", "26", "--ids", "1",
    ],
    "fused_torch, batch 1024, 24 x 100k x 64, 10 ids": ["--kernel", "fused_torch"],
    "pinned_caching, batch 1024, 24 x 100k x 64, 10 ids": ["--kernel", "pinned_caching"],
}  # fmt: skip


def files_with_gpu_tests() -> list[str]:
    """Test files that have tests marked ``gpu``."""
    marks = ("mark.gpu", "each_device", "device: str")
    found = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(mark in path.read_text() for mark in marks)
    ]
    return [str(path.relative_to(ROOT)) for path in found]


def gpu_tests(runner: Runner, outcomes: Path | None) -> dict[str, Any]:
    """Run every test marked ``gpu``.

    Args:
        runner: runs pytest.
        outcomes: file for outcomes; ``None``: tests are only listed.

    Returns:
        The outcome of each test by name, and what became of pytest.
    """
    files = files_with_gpu_tests()
    listed = _pytest(runner, "--collect-only", *files, limit_s=90)
    names = [line for line in listed.output.splitlines() if "::" in line]
    reason = "no CUDA device" if outcomes is None else "time was up"
    missing = {"outcome": "not run", "reason": reason, "seconds": 0.0, "figures": {}}
    runs, known = ([], {}) if outcomes is None else _run_tests(runner, files, outcomes)
    found = [known.get(name, {"name": name, **missing}) for name in names]
    return {"tests": found, "runs": [_told(done) for done in (listed, *runs)]}


def _run_tests(
    runner: Runner, files: Sequence[str], outcomes: Path
) -> tuple[list[Done], dict[str, dict[str, Any]]]:
    """Run the tests of some files: those that want the device for themselves first, then the others side by side."""
    runner = Runner(runner.folder, runner.deadline, {VARIABLE: str(outcomes)})
    others = [name for name in files if name != ALONE]
    runs = [
        _pytest(runner, "-n0", ALONE, limit_s=120),
        _pytest(runner, "-n4", "--timeout=300", *others, limit_s=330),
    ]
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    return runs, {outcome["name"]: outcome for outcome in map(json.loads, lines)}


def _pytest(runner: Runner, *words: str, limit_s: float) -> Done:
    plugin = "tests.benchmarks.gpu_report.recorder"
    # Another torch may warn of what the pinned one does not: that is no failure of a test here.
    shared = ("-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", plugin, "-p", "no:cacheprovider")
    return runner.run(*shared, *words, limit_s=limit_s)


def _told(done: Done) -> dict[str, Any]:
    return {"command": " ".join(done.command), "seconds": round(done.seconds, 1), "problem": done.problem}


def command(runner: Runner, *words: str, limit_s: float) -> tuple[Done, Any]:
    """Run a program whose output is JSON, and read that."""
    done = runner.run("-m", *words, limit_s=limit_s)
    try:
        return done, json.loads(done.output.strip().splitlines()[-1]) if done.code == 0 else None
    except (IndexError, ValueError):
        return done, None


def machine(runner: Runner) -> dict[str, Any]:
    """What `doctor` finds: versions, memory and bandwidths."""
    done = runner.run("-m", "shardwright", "doctor", "--json", limit_s=60)
    try:
        found = json.loads(done.output)
    except ValueError:
        return {**_told(done), "findings": []}
    kept = ("python", "torch", "Triton", "Numba", "FBGEMM", "devices")
    return {**_told(done), "findings": [one for one in found if one["part"] in kept]}


def kernels(runner: Runner) -> dict[str, Any]:
    """Lookups and updates beside copies, and whether the goals are met; a program of its own for each kernel."""
    shared = ["tests.benchmarks.gpu_report.device_kernels", "--steps", "5", "--kernel"]
    return {name: _kernel(*command(runner, *shared, name, limit_s=75)) for name in KERNELS}


def _kernel(done: Done, data: Any) -> dict[str, Any]:
    if data is None:
        return {**_told(done), "goals": {}}
    copied = data["copy_gb_s"] * 1e9
    large = data["cases"][0]["kernels"]
    goals = {
        own["kernel"]: {
            "lookup": round(own["lookup_bandwidth"] / copied, 3),
            "update": round(own["update_bandwidth"] / copied, 3),
            "met": own["lookup_bandwidth"] >= LOOKUP_GOAL * copied
            and own["update_bandwidth"] >= UPDATE_GOAL * copied,
        }
        for own in large
    }
    return {**_told(done), "figures": data, "goals": goals}


def steps(runner: Runner) -> dict[str, Any]:
    """Times of whole steps, by kernel."""
    found = {}
    for name, words in STEPS.items():
        shared = ["tests.benchmarks.steps.step", "--device", "cuda", "--ranks", "1", "--types", "table_wise"]
        done, data = command(runner, *shared, *words, limit_s=60)
        found[name] = {**_told(done), "figures": data}
    return found


def demo(runner: Runner) -> dict[str, Any]:
    """The demo's throughput."""
    words = ["-m", "shardwright", "demo", "--device", "cuda", "--ranks", "1", "--steps", "200"]
    done = runner.run(*words, limit_s=90)
    speed = [line.strip() for line in done.output.splitlines() if "examples/s on" in line]
    return {**_told(done), "speed": speed[-1] if speed else ""}


SECTIONS: Mapping[str, Callable[[Runner], dict[str, Any]]] = {
    "machine": machine,
    "kernels": kernels,
    "steps": steps,
    "demo": demo,
}
"""Sections beside the tests; all but the first need a device."""
