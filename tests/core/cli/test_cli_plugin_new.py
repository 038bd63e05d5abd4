"""`shardwright plugin new` and `shardwright plugins NAME`."""

from __future__ import annotations

import ast
import re

import pytest

from shardwright.cli.new_plugin import distribution
from shardwright.errors import InvalidInputError, UnknownNameError
from shardwright.hookspecs import KINDS

NAMES = [kind.name for kind in KINDS]


@pytest.mark.parametrize("kind", NAMES)
def test_new_plugin_of_each_kind_is_small_enough_to_read_in_a_minute(kind):
    files = distribution("acme_thing", kind)
    package = {path: text for path, text in files.items() if path.startswith("shardwright_acme_thing/")}
    assert sum(len(text.splitlines()) for text in package.values()) <= 100
    for path, text in files.items():
        if path.endswith(".py"):
            ast.parse(text)
        assert max(len(line) for line in text.splitlines()) <= 120


def test_new_plugin_of_no_kind_is_told_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no kind 'codex'.*Did you mean 'codec'"):
        distribution("acme", "codex")


@pytest.mark.parametrize("name", ["Acme", "acme-thing", "1st", ""])
def test_new_plugin_with_a_name_that_is_no_modules_is_refused(name):
    with pytest.raises(InvalidInputError, match="must begin with a small letter"):
        distribution(name, "codec")


def test_new_plugin_leaves_what_is_there_alone(run_python, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    done = run_python(
        "-m", "shardwright", "plugin", "new", "acme", "--kind", "codec", "--output", str(tmp_path)
    )
    assert done.returncode == 1
    assert "README.md exists already" in done.stderr
    assert (tmp_path / "README.md").read_text() == "mine"


def test_new_plugin_of_a_name_that_is_taken_says_by_whom(run_python, tmp_path):
    output = ["--output", str(tmp_path / "out")]
    done = run_python("-m", "shardwright", "plugin", "new", "good", "--kind", "sharding_type", *output)
    assert done.returncode == 1
    assert "the sharding type 'good' is there already: acme_good." in done.stderr
    assert "'acme_good' from acme-good 1.2.0. Two of one name cannot be used" in done.stderr
    done = run_python("-m", "shardwright", "plugin", "new", "plugins", "--kind", "codec", *output)
    assert done.returncode == 1
    assert "would be shardwright_plugins, and a module of that name is installed already" in done.stderr
    assert not (tmp_path / "out").exists()
    done = run_python("-m", "shardwright", "plugin", "new", "good", "--kind", "codec", *output)
    assert done.returncode == 0, done.stderr  # of another kind


def test_plugins_of_a_name_shows_contract_and_where_it_comes_from(run_python, site):
    done = run_python("-m", "shardwright", "plugins", "good", SHARDWRIGHT_PLUGINS="acme_good")
    assert done.returncode == 0, done.stderr
    assert "good (sharding_types), loaded" in done.stdout
    assert "plugin acme_good of acme-good 1.2.0" in done.stdout
    assert f"file {site / 'acme_good.py'}" in done.stdout
    assert "contract shardwright.contracts.sharding_type.ShardingType, version 1" in done.stdout
    (link,) = re.findall(r"^  docs (\S+)$", done.stdout, re.MULTILINE)
    assert link == "https://acme.example/docs/acme-good"


def test_plugins_of_a_failed_plugin_says_why(run_python):
    done = run_python("-m", "shardwright", "plugins", "acme_bad_import")
    assert "acme_bad_import (offers nothing), failed" in done.stdout
    assert "why not: ModuleNotFoundError: No module named 'acme_needs_this'" in done.stdout


def test_plugins_of_an_unknown_name_is_told_the_nearest(run_python):
    done = run_python("-m", "shardwright", "plugins", "goood", SHARDWRIGHT_PLUGINS="acme_good")
    assert done.returncode == 1
    assert "Did you mean 'good'" in done.stderr
