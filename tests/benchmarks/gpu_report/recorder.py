"""A plugin of pytest that writes the outcome of each test to a file as it comes, so that a run may be cut short."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "GPU_REPORT_OUTCOMES"
"""Environment variable: the file that outcomes are added to, a JSON object a line."""


def pytest_runtest_logreport(report: Any) -> None:
    """Write an outcome: of the call, or of a setup that did not come to it. Workers leave that to the main process."""
    path = os.environ.get(VARIABLE)
    if not path or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        outcome = {
            "name": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "reason": _reason(report),
            "figures": dict(report.user_properties),
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(outcome) + "\n")


def _reason(report: Any) -> str:
    """Why a test did not pass, in a line."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # file, line and reason of a skip
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return (lines or str(report.longrepr).splitlines() or [""])[0].removeprefix("E ").strip()[:300]
