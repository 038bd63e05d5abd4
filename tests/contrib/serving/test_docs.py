"""What the distribution's pages show is so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import readme
from tests.contrib import distributions

DOCS = distributions.ROOT / "serving" / "shardwright_serving" / "docs"


@pytest.mark.slow
def test_docs_export_makes_the_package_that_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    readme.check_output("export.py", DOCS / "packages.md", tmp_path, capsys)
