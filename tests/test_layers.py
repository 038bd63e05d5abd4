"""Layers of folders, as ``[tool.importlinter]`` of pyproject.toml states them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = """
import sys
from importlinter.cli import lint_imports
sys.path[:0] = sys.argv[1:3]
sys.exit(lint_imports(config_filename=sys.argv[3], no_cache=True))
"""


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Lint the tree of which ``root`` is a copy or the original, in a process of its own: it imports both packages."""
    sources = [str(root / "core"), str(root / "plugins")]
    command = [sys.executable, "-c", LINT, *sources, str(ROOT / "pyproject.toml")]
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


def test_layers_are_kept() -> None:
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("core/shardwright/planning/tables/spec.py", "from shardwright.planning.report.report import Report"),
        ("core/shardwright/planning/search/search.py", "import shardwright_plugins.proposers"),
        ("core/shardwright/planning/search/failure.py", "from shardwright.host.plugin_host import host"),
        (
            "core/shardwright/planning/layouts/dataflows.py",
            "from shardwright.runtime.routed.direct import DirectReturn",
        ),
        (
            "core/shardwright/runtime/ranks/comm.py",
            "from shardwright.runtime.sharded.collections import sharders",
        ),
    ],
)
def test_layers_that_are_broken_are_told(tmp_path: Path, path: str, line: str) -> None:
    for folder in ("core", "plugins"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / path
    source.write_text(source.read_text() + f"\n\ndef _late():\n    {line}\n")
    found = lint(tmp_path)
    assert found.returncode == 1, found.stderr
    assert "is not allowed to import" in found.stdout


def test_core_imports_the_plugin_host_where_the_linter_sees_it() -> None:
    """The package ``shardwright.host`` finds its names when they are asked for: an import of it shows no layer."""
    files = list((ROOT / "core").rglob("*.py"))
    facade = re.compile(r"^\s*from shardwright\.host import", re.MULTILINE)
    assert [str(path) for path in files if facade.search(path.read_text())] == []
