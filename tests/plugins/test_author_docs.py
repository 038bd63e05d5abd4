"""The pages for authors: contracts are those of the code, examples run and pass the kit, and nothing is left out."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from tests import readme
from tests.plugins import author_pages

import shardwright_plugins
import shardwright_testing as testing
from shardwright.hookspecs import KINDS
from shardwright.planning.options.options import Options

NAMES = sorted(author_pages.PAGES)
OTHER_PAGES = {"dataflow", "plugins", "row_index", "rows_in_checkpoints", "sharder", "versions"}  # of no kind
VERSIONS = author_pages.FOLDER / "versions.md"
TEMPLATES = Path(shardwright_plugins.__file__).parent / "commands/new_plugin/templates"
TAUGHT = sorted([*author_pages.FOLDER.glob("*.md"), *TEMPLATES.glob("*/__init__.py.txt")])


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a page's example, importable during the test."""
    for block in readme.blocks(author_pages.page(request.param)):
        if block.name.endswith(".py"):
            (tmp_path / block.name).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    for path in tmp_path.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return tmp_path


def test_each_kind_has_a_page_and_each_page_a_kind() -> None:
    pages = {path.stem for path in author_pages.FOLDER.glob("*.md")} - OTHER_PAGES
    assert pages == set(NAMES)
    assert len(NAMES) == len(KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_page_contract_is_that_of_the_code(name: str) -> None:
    """A contract that changes changes what `api` promises: versions.md, then `python -m tests.plugins.author_pages`."""
    page = author_pages.page(name)
    contract = author_pages.contract_text(author_pages.PAGES[name].contract)
    assert readme.source("contract", page) == contract


@pytest.mark.parametrize("name", NAMES)
def test_page_has_its_parts(name: str) -> None:
    text = author_pages.page(name).read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    shown = "## On the command line" if name == "extension" else "## In plan and report"
    assert headings == ["## The contract", "## An example", shown, "## How to test it"]
    (kit,) = [name for name in testing.__all__ if name.endswith("Tests") and f"({name})" in text]
    assert kit.removesuffix("Tests") == author_pages.PAGES[name].contract.__name__


@pytest.mark.parametrize(("name", "example"), [(name, name) for name in NAMES], indirect=["example"])
def test_page_example_does_as_the_page_shows(name: str, example: Path) -> None:
    (shown,) = [block.text for block in readme.blocks(author_pages.page(name)) if block.language == "pycon"]
    test = doctest.DocTestParser().get_doctest(shown, {}, name, str(author_pages.page(name)), 0)
    assert len(test.examples) > 3
    told: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert result.failed == 0, "".join(told)


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "example"), [(name, name) for name in NAMES], indirect=["example"])
@pytest.mark.slow
def test_page_example_passes_the_kit(name: str, example: Path) -> None:
    path = os.pathsep.join([str(example), *filter(None, sys.path)])
    (tests,) = example.glob("test_acme_*.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=example,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("path", TAUGHT, ids=lambda path: path.parent.name + "/" + path.name)
def test_what_authors_are_taught_of_options_is_there(path: Path) -> None:
    taught = set(re.findall(r"\boptions\.([a-z]\w*)", path.read_text()))
    known = {*dir(Options), *(field.name for field in attrs.fields(Options))}
    assert taught <= known


def test_versions_name_the_version_of_the_contracts() -> None:
    versions = {kind.contract.api for kind in KINDS}
    assert f"`api = {versions.pop()}`" in VERSIONS.read_text()
    assert not versions
