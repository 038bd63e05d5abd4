"""Layers of folders, as ``[tool.importlinter]`` of pyproject.toml states them."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
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
        ("core/shardwright/planning/search/loaded.py", "from shardwright.host.plugin_host import host"),
        ("core/shardwright/cli/plan.py", "from shardwright.runtime.sharded.models import planner"),
        (
            "core/shardwright/planning/layouts/dataflows.py",
            "from shardwright.runtime.routed.direct import DirectReturn",
        ),
        (
            "core/shardwright/runtime/ranks/environment.py",
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


CORE = ROOT / "core"


def imports(path: Path, modules: set[str]) -> set[str]:
    """The modules of core that a file imports anywhere in it: at the top, in functions, and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else str(node.module) for name in named}
    return found & modules


def test_no_files_of_core_import_each_other_in_a_circle() -> None:
    files = {
        ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in CORE.rglob("*.py")
    }
    graph = {name: imports(path, set(files)) - {name} for name, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))
