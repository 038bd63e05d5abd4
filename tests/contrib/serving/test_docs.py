"""What the distribution's pages show is so."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tests import readme
from tests.contrib import distributions

FOLDER = distributions.ROOT / "serving"
DOCS = FOLDER / "shardwright_serving" / "docs"
PAGES = [FOLDER / "README.md", *sorted(DOCS.glob("*.md"))]

_LINK = re.compile(r"\]\((?P<target>[^)#:]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_docs_point_to_what_is_there(page: Path) -> None:
    for found in _LINK.finditer(page.read_text()):
        assert (page.parent / found["target"]).exists(), found["target"]


@pytest.mark.slow
def test_docs_export_makes_the_package_that_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = DOCS / "packages.md"
    monkeypatch.chdir(tmp_path)
    Path("export.py").write_text(readme.source("export.py", page))
    runpy.run_path("export.py")
    assert capsys.readouterr().out == readme.output_of("export.py", page)
