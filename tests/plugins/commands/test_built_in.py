"""The built-in commands come by the hook: without plugins they are not there, and listing imports none of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.plugins.commands import every_command
from tests.programs import printed_by
from tests.stranger import run_python

LISTING = """
import json, sys
from typer.testing import CliRunner
from shardwright.cli import app
shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output
heavy = {"torch", "numba", "sklearn"} & set(sys.modules)
heavy |= {name for name in sys.modules if name.startswith("shardwright_plugins.commands.") and name.count(".") > 2}
print(json.dumps([" demo " in shown, " bench " in shown, sorted(heavy)]))
"""


def test_built_in_commands_are_listed_without_being_imported() -> None:
    done = run_python("-c", LISTING)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, True, []]


def test_built_in_commands_are_unknown_without_plugins() -> None:
    done = run_python("-m", "shardwright", "demo", SHARDWRIGHT_PLUGINS="", COLUMNS="2000")
    assert done.returncode == 2
    assert "No such command 'demo'." in done.stderr
    assert "'builtin_commands' from shardwright" in done.stderr
    assert "off by SHARDWRIGHT_PLUGINS=''" in done.stderr


def test_built_in_command_is_shown_by_its_word() -> None:
    done = run_python("-m", "shardwright", "plugins", "demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("command:demo (extensions), loaded")


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
