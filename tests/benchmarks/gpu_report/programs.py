"""Programs that the report runs, with the source roots of this repository, whether it is installed or not."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

ROOT = Path(__file__).parents[3]
REQUIRED = (
    "attrs",
    "highspy",
    "jsonschema_rs",
    "numpy",
    "pluggy",
    "pytest",
    "rich",
    "torch",
    "triton",
    "typer",
)
"""Modules without which less or nothing runs; `pip download` brings those that are missing as wheels."""


def missing_modules() -> list[str]:
    """Names of required modules that are not there."""
    return [name for name in REQUIRED if importlib.util.find_spec(name) is None]


def write_metadata(folder: Path) -> None:
    """Write what an installation would: the entry points by which plugins are found.

    Args:
        folder: a folder that is to be on Python's path.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.search(r'__version__ = "(.+)"', (ROOT / "core/shardwright/__init__.py").read_text())
    version = found.group(1) if found else "0"
    info = folder / f"shardwright-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shardwright\nVersion: {version}\n")
    lines = [
        "[shardwright]",
        *(f"{name} = {where}" for name, where in project["entry-points"]["shardwright"].items()),
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@frozen
class Done:
    """What became of a program.

    Args:
        command: its words after Python's.
        code: exit code; ``None`` if it was ended when its time was up.
        output: standard output.
        errors: standard error.
        seconds: time that it took, s.
    """

    command: list[str]
    code: int | None
    output: str
    errors: str
    seconds: float

    @property
    def problem(self) -> str:
        """Why it gave nothing, in a line; empty if it ended well."""
        if self.code == 0:
            return ""
        if self.code is None:
            return f"not ended after {self.seconds:.0f} s"
        lines = [line for line in (self.errors or self.output).splitlines() if line.strip()]
        return f"exit code {self.code}: {lines[-1].strip() if lines else 'it said nothing'}"


@frozen
class Runner:
    """Runs programs of Python until the whole time is up.

    Args:
        folder: folder for what they need.
        deadline: time on the monotonic clock at which all is to be over, s.
        variables: further environment variables.
    """

    folder: Path
    deadline: float
    variables: Mapping[str, str] = field(factory=dict)

    def environment(self) -> dict[str, str]:
        """The environment: source roots and their metadata come before whatever is installed."""
        if not (self.folder / "path").exists():
            write_metadata(self.folder / "path")
        roots = [ROOT / "core", ROOT / "plugins", ROOT, self.folder / "path"]
        path = os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "PYTHONPATH": path, **self.variables}

    def run(self, *words: str, limit_s: float) -> Done:
        """Run ``python WORDS``.

        Args:
            words: arguments of Python.
            limit_s: longest time, s; less if all is to be over before.
        """
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=max(1.0, min(limit_s, self.deadline - start)))
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            # With the processes that it started, which else keep the pipes open, and the device.
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            code = None
        return Done(list(words), code, output, errors, time.monotonic() - start)
