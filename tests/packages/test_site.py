"""The site: it has every page once, builds without a warning, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import readme

ROOT = readme.README.parent
FOLDERS = ("core/shardwright/docs", "plugins/shardwright_plugins/docs", "contrib")
# Of what a browser fetches by itself; links that a reader follows may lead elsewhere.
LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]* src=\"?(https?:)?//|<link[^>]* href=\"?(https?:)?//[^>]*stylesheet"
)


def test_site_has_every_page_once_in_its_navigation() -> None:
    shown = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT)) for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")}
    assert sorted(shown) == sorted(pages | {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"})


@pytest.mark.slow
def test_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    made = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert [path.name for path, text in made.items() if LOADED.search(text)] == []
    notebook = re.sub(r"<[^>]+>", "", made[tmp_path / "contrib/examples/notebook.html"])
    assert "cluster_plan = planner.plan_tables(tables)" in notebook
    commands = re.sub(r"<[^>]+>", "", made[tmp_path / "reference/environment.html"])
    assert "--storage-estimator" in commands  # of a command of core; and, of a plugin's:
    assert "--beside" in commands
    constraints = made[tmp_path / "reference/planning.html"]
    assert 'id="shardwright.ParameterConstraints"' in constraints
    shown = re.sub(r"<[^>]+>", "", constraints)
    assert re.search(r"ranks:\s+int\s+\|\s+Iterable\[int\]\s+\|\s+None\s+=\s+None", shown)
