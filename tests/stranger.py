"""A stranger's distribution, as the README shows it: built and installed outside of this source tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

from tests import readme

NAME = "even_first"
DISTRIBUTION = "acme-even-first"
FILES = ("pyproject.toml", "acme_even_first.py")


def install(folder: Path) -> Path:
    """Write the README's files, build and install them with pip; returns the folder to put on the path."""
    project, site = folder / DISTRIBUTION, folder / "site"
    project.mkdir()
    for name in FILES:
        (project / name).write_text(readme.source(name))
    # Offline: the build backend is one that the tests need anyway, and shardwright is here.
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    done = run_python("-m", "pip", "install", "--quiet", *offline, "--target", str(site), str(project))
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def run_python(
    *arguments: str, site: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with the plugin if ``site`` is given; keywords are its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWRIGHT_")}
    path = os.pathsep.join(filter(None, [str(site or ""), kept.get("PYTHONPATH", "")]))
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, env={**kept, "PYTHONPATH": path, **environment}, stdout=PIPE, stderr=PIPE, text=True
    ) as process:
        try:
            output, errors = process.communicate()
        except BaseException:  # of pytest's time-out, too
            process.terminate()  # a launcher then ends its ranks, as it could not if it were killed
            print(*process.communicate(timeout=15), sep="\n")
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
