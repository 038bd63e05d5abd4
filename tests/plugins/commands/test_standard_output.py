"""Programs read what commands print: their standard output has the tool's words and nothing of a library's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.plugins.commands import every_command
from tests.programs import printed_by

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_standard_output_of_every_command_has_nothing_from_below_python(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWRIGHT_")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    environment = {**kept, "PYTHONPATH": path}
    assert printed_by("-m", every_command.__name__, cwd=tmp_path, env=environment) == ""
    written = json.loads((tmp_path / "printed.json").read_text())
    assert {name: code for name, (code, _) in written["printed"].items() if code} == {}
    assert [name for name, (_, text) in written["printed"].items() if not text.strip()] == []
    # The demo trains for long: the test of its real processes reads its output.
    assert {*written["printed"], "demo"} == set(written["names"])
