"""Everything that a machine with a GPU can prove, in one run of less than ten minutes.

    python -m tests.benchmarks.gpu_report [--output FOLDER] [--minutes 10]

It runs in the repository's root, on what is installed or on the source alone. `FOLDER` gets `report.json` and
`report.md`: every test marked `gpu` by name (passed, failed, skipped with its reason, or not run), bandwidths of the
device, lookups and updates beside copies and beside their goals, times of steps, planned and peak memory, and the
demo's throughput. Without a GPU it says so, and lists the tests as not run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu_report.markdown import page_of
from tests.benchmarks.gpu_report.programs import Runner, missing_modules
from tests.benchmarks.gpu_report.sections import SECTIONS, gpu_tests

_LEFT_FOR_WRITING_S = 15.0
_OF_FIGURES = 0.45
"""Part of the time after which figures that are still to be taken are left out, so that tests run on a slow machine."""


def report(folder: Path, minutes: float) -> dict[str, Any]:
    """Run all sections; after each, what there is so far is written."""
    start = time.monotonic()
    device = _device()
    note = "" if device else "No CUDA device: nothing below was run on one."
    found: dict[str, Any] = {
        "device": device,
        "note": note,
        "missing": missing_modules(),
        "sections": {},
        "tests": {"tests": [], "runs": []},
    }
    with tempfile.TemporaryDirectory() as scratch:
        whole_s = 60 * minutes - _LEFT_FOR_WRITING_S
        for_figures = Runner(Path(scratch), start + _OF_FIGURES * whole_s)
        for name, section in SECTIONS.items():
            if device or name == "machine":
                found["sections"][name] = section(for_figures)
                _write(folder, found, start)
        runner = Runner(Path(scratch), start + whole_s)
        found["tests"] = gpu_tests(runner, Path(scratch) / "outcomes.jsonl" if device else None)
    _write(folder, found, start)
    return found


def _device() -> str:
    """Name of the CUDA device; empty if there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def _write(folder: Path, found: dict[str, Any], start: float) -> None:
    found["seconds"] = round(time.monotonic() - start, 1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(found, indent=1))
    (folder / "report.md").write_text(page_of(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="gpu_report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_report"), help="folder of report.json and report.md"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="longest time of all")
    given = parser.parse_args()
    made = report(given.output, given.minutes)
    print(page_of(made))
