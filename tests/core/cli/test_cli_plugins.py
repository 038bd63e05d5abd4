from __future__ import annotations

import json
import os
import re

import pytest
from typer.testing import CliRunner

import shardwright
from shardwright.cli import app
from shardwright.cli.plugins import _fitted
from shardwright.cli.tables import flowing


@pytest.fixture
def shown(installed):
    """Run `shardwright plugins` here, with `DISTRIBUTIONS` installed; keywords are variables without SHARDWRIGHT_."""

    def run(*words, columns="400", **environment):
        variables = {f"SHARDWRIGHT_{name}": value for name, value in environment.items()}
        unset = dict.fromkeys(name for name in os.environ if name.startswith("SHARDWRIGHT_"))
        return CliRunner().invoke(app, ["plugins", *words], env={"COLUMNS": columns, **unset, **variables})

    return run


@pytest.fixture
def listed(shown):
    """Run `shardwright plugins --json`: name or plugin -> row, and the exit code."""

    def run(**environment):
        done = shown("--json", **environment)
        return {row["name"] or row["plugin"]: row for row in json.loads(done.output)}, done.exit_code

    return run


def test_plugins_json_tells_conflicts_and_their_settlement(shown):
    def states(**environment):
        rows = json.loads(shown("--json", **environment).output)
        rows = [row for row in rows if row["name"] == "contested"]
        return {row["distribution"]: (row["state"], row["reason"]) for row in rows}

    contested = states()
    assert {state for state, _ in contested.values()} == {"conflict"}
    assert all("acme-duplicate-one 1.0" in reason for _, reason in contested.values())
    assert states(PREFER="contested=acme-duplicate-two") == {
        "acme-duplicate-one": ("off", "the name is given to acme-duplicate-two 2.0"),
        "acme-duplicate-two": ("loaded", ""),
    }


def test_plugins_strict_still_lists_and_exits_with_one(listed):
    rows, code = listed(STRICT_PLUGINS="1")
    assert code == 1
    assert rows["acme_raises"]["state"] == "failed"


@pytest.mark.parametrize("columns", ["", "100", "80"])
def test_tables_of_broken_plugins_fit_the_page(shown, columns):
    page = shown(columns=columns).output
    assert max(map(len, page.splitlines())) <= int(columns or "100")
    words = " ".join(page.split())
    for text in ("acme_bad_import", "No module named 'acme_needs_this'", "acme-duplicate-two 2.0"):
        assert text in words


def test_plugin_in_full_fits_the_page_and_keeps_its_lines_and_their_indentation():
    path = "/a/long/path" * 20
    shown = _fitted(f"good (sharding_types), loaded\n  file {path}\n\n  Args:\n    name: {'word ' * 40}")
    lines = shown.splitlines()
    assert lines[:2] == ["good (sharding_types), loaded", "  file"]
    assert lines[2:5] == [f"  {path}", "", "  Args:"]
    assert [line[:5] for line in lines[5:]] == ["    n", "    w", "    w"]
    assert all(len(line) <= 100 for line in lines if path not in line)
    assert (
        " ".join(shown.split())
        == f"good (sharding_types), loaded file {path} Args: name: {'word ' * 40}".rstrip()
    )


def test_plugin_in_full_lets_its_docstring_flow():
    assert flowing("Rows.\n\nThey\nflow.\n\nArgs:\n    a: one.\n    b: two.\n") == (
        "Rows.\n\nThey flow.\n\nArgs:\n    a: one.\n    b: two.\n"
    )


def test_plugins_misspelt_selection_is_told_without_traceback(run_python):
    done = run_python("-m", "shardwright", "plugins", SHARDWRIGHT_PLUGINS="acme_god")
    assert done.returncode == 1
    assert done.stderr.startswith("error: SHARDWRIGHT_PLUGINS names the plugin 'acme_god'")
    assert "Traceback" not in done.stderr


def test_cli_version_prints_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"shardwright {shardwright.__version__}\n"


def test_plugins_of_a_name_shows_contract_and_where_it_comes_from(shown, site):
    done = shown("good", PLUGINS="acme_good")
    assert done.exit_code == 0
    assert "good (sharding_types), loaded" in done.output
    assert "plugin acme_good of acme-good 1.2.0" in done.output
    assert f"file {site / 'acme_good.py'}" in done.output
    assert "contract shardwright.contracts.sharding_type.ShardingType, version 1" in done.output
    (link,) = re.findall(r"^  docs (\S+)$", done.output, re.MULTILINE)
    assert link == "https://acme.example/docs/acme-good"


def test_plugins_of_a_failed_plugin_says_why(shown):
    page = shown("acme_bad_import").output
    assert "acme_bad_import (offers nothing), failed" in page
    assert "why not: ModuleNotFoundError: No module named 'acme_needs_this'" in page


def test_plugins_of_an_unknown_name_is_told_the_nearest(shown):
    done = shown("goood", PLUGINS="acme_good")
    assert "Did you mean 'good'" in str(done.exception)
