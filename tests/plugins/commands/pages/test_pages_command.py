"""`shardwright docs`: pages of core and of plugins, found without importing a plugin."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tests.core.stubs import OWN_NAMES
from tests.stranger import run_python

import shardwright
from shardwright.hookspecs import KINDS
from shardwright.host import PluginHost
from shardwright_plugins.commands.pages.command import docs, pages

DOCS = Path(shardwright.__file__).parent / "docs"


@pytest.fixture
def scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    """A plugin in a package that has a page, and whose import fails."""
    package = tmp_path / "acme_scales"
    (package / "plugin").mkdir(parents=True)
    (package / "docs").mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin/__init__.py").write_text("raise OSError('no scales')")
    (package / "docs/weighing.md").write_text("<!-- made -->\n\n# How to weigh\n\nSlowly.\n")
    monkeypatch.syspath_prepend(tmp_path)
    return EntryPoint("scales", "acme_scales.plugin", "shardwright")


def test_pages_are_those_of_core_and_of_packages_of_plugins(scales: EntryPoint) -> None:
    found = pages(PluginHost(entry_points=[scales], environment={}))
    assert {page.path for page in found if page.package == "shardwright"} == set(DOCS.rglob("*.md"))
    (own,) = (page for page in found if page.package != "shardwright")
    assert (own.name, own.title, own.package) == ("weighing", "How to weigh", "acme_scales")


def test_docs_lists_every_page_and_prints_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = run_python("-m", "shardwright", "docs").stdout
    assert all(Path(kind.page).stem in listed for kind in KINDS)
    assert "Documents: workloads, constraints, machines, plans" in listed
    page = DOCS / "documents.md"
    assert run_python("-m", "shardwright", "docs", "documents").stdout == f"{page}\n\n{page.read_text()}"


@pytest.mark.parametrize("name", ["howto/reshard", "reshard.md"])
def test_docs_page_is_found_by_its_path(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    docs(name)
    assert capsys.readouterr().out.startswith(f"{DOCS / 'howto' / 'reshard.md'}\n")


def test_docs_page_unknown_tells_the_nearest() -> None:
    done = run_python("-m", "shardwright", "docs", "engin")
    assert done.returncode == 1
    assert "error: no page 'engin'. Known: " in done.stderr
    assert "Did you mean 'engine'?" in done.stderr


def test_docs_reference_has_every_public_name_on_one_page() -> None:
    named = re.compile(r"^::: shardwright\.(\w+)$", re.MULTILINE)
    found = [name for page in DOCS.rglob("*.md") for name in named.findall(page.read_text())]
    assert sorted(found) == OWN_NAMES


def test_docs_reference_pages_print_signatures_and_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    for page in (DOCS / "reference").glob("*.md"):
        docs(page.stem)
    told = capsys.readouterr().out
    assert sorted(re.findall(r"^## shardwright\.(\w+)", told, re.MULTILINE)) == OWN_NAMES
    assert ":::" not in told
    assert "found: str = '', state: str = 'ok'" in told
    assert "## shardwright.Topology(world_size: Annotated[int, Within(ge=1, le=MOST_RANKS)], " in told
    assert inspect.getdoc(shardwright.ParameterConstraints) in told
