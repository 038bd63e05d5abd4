"""What the distribution's pages show is so."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from tests import readme
from tests.contrib import distributions

DOCS = distributions.ROOT / "serving" / "shardwright_serving" / "docs"


@pytest.mark.slow
def test_docs_export_makes_the_package_that_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = DOCS / "packages.md"
    monkeypatch.chdir(tmp_path)
    Path("export.py").write_text(readme.source("export.py", page))
    runpy.run_path("export.py")
    assert capsys.readouterr().out == readme.output_of("export.py", page)
