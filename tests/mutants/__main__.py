"""How many mutants of core some tests kill.

    python -m tests.mutants core/shardwright/sparse --tests tests/core/sparse

Each mutant is run in a copy of the tree, in a process of its own, which is forked from one that has imported torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from tests.mutants import Mutant, draw

_HEAVY = ("numpy", "pytest", "scipy.optimize", "torch.distributed", "torch.optim")
"""Imported once, before all mutants; nothing of them imports the source that changes."""

_OUTPUT = "pytest.txt"
"""What pytest printed, in the copy of the tree."""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    folders: Annotated[list[str], typer.Argument(help="Folders or files whose mutants are drawn.")],
    tests: Annotated[list[str], typer.Option(help="Tests that run against each mutant, in this order.")],
    count: Annotated[int, typer.Option(min=1, help="Mutants to draw.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    seconds: Annotated[
        float, typer.Option(min=1, help="Time-out of a mutant; beyond it, it is killed.")
    ] = 300,
) -> None:
    """Print which mutants the tests kill and which survive, and the share."""
    for module in _HEAVY:
        __import__(module)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        root = Path(scratch)
        _copy_tree(Path.cwd(), root)
        if (failed := _run(root, tests, seconds)) != "survived":
            raise SystemExit(f"the tests fail without a mutant: {failed}\n{_summary(root)}")
        killed = 0
        for mutant in (drawn := draw(root, folders, count, seed)):
            outcome = _outcome(root, mutant, tests, seconds)
            killed += outcome != "survived"
            print(f"{outcome:9} {mutant.path}:{mutant.line}: {mutant.text}", flush=True)
        print(f"{killed} of {len(drawn)} killed")


def _copy_tree(source: Path, root: Path) -> None:
    """Copy what git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (source / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, root / name)


def _outcome(root: Path, mutant: Mutant, tests: list[str], seconds: float) -> str:
    path = root / mutant.path
    source = path.read_bytes()
    path.write_bytes(mutant.of(source))
    try:
        return _run(root, tests, seconds)
    finally:
        path.write_bytes(source)


def _run(root: Path, tests: list[str], seconds: float) -> str:
    """ "survived", "killed" or "timed out"."""
    if (child := os.fork()) == 0:
        _child(root, tests)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "survived" if status == 0 else "killed"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def _summary(root: Path) -> str:
    """Lines of pytest's summary of the last run, which name the tests that failed and why."""
    lines = (root / _OUTPUT).read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith(("FAILED ", "ERROR "))) or "\n".join(
        lines[-20:]
    )


def _child(root: Path, tests: list[str]) -> None:
    """Run the tests in the copy, write what pytest prints to a file there, and exit with its status."""
    import pytest

    os.setsid()
    os.chdir(root)
    roots = [str(root / folder) for folder in ("core", "plugins")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*roots, str(root)])
    sys.path[:0] = [str(root), *roots]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "shardwright")]:
        del sys.modules[name]
    with (root / _OUTPUT).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os._exit(pytest.main(["-n0", "-x", "-q", "-p", "no:cacheprovider", *tests]))


if __name__ == "__main__":
    app()
