"""`shardwright plugin new`: what it writes, and what it refuses."""

from __future__ import annotations

import ast
import keyword

import pytest
from tests.core.test_hookspecs import NEW_KIND
from tests.stranger import run_python

from shardwright.errors import InvalidInputError, UnknownNameError
from shardwright.hookspecs import KINDS
from shardwright_plugins.commands.new_plugin.command import distribution, new

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


@pytest.mark.parametrize("name", [*map(str.lower, keyword.kwlist), "none_"])
def test_new_plugin_that_has_the_name_of_a_keyword_is_a_class(name):
    for path, text in distribution(name, "codec").items():
        if path.endswith(".py"):
            ast.parse(text)


def test_new_plugin_of_no_kind_is_told_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no kind 'codex'.*Did you mean 'codec'"):
        distribution("acme", "codex")


@pytest.mark.parametrize("name", ["Acme", "acme-thing", "1st", ""])
def test_new_plugin_with_a_name_that_is_no_modules_is_refused(name):
    with pytest.raises(InvalidInputError, match="must begin with a small letter"):
        distribution(name, "codec")


def test_new_plugin_leaves_what_is_there_alone(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    done = run_python(
        "-m", "shardwright", "plugin", "new", "acme", "--kind", "codec", "--output", str(tmp_path)
    )
    assert done.returncode == 1
    assert "README.md exists already" in done.stderr
    assert (tmp_path / "README.md").read_text() == "mine"


def test_new_plugin_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInputError, match="file exists already"):
        new("acme", "codec", tmp_path / "file")


def test_new_plugin_of_a_name_that_is_taken_says_by_whom(tmp_path):
    def made(name, kind):
        output = ["--output", str(tmp_path / "out")]
        return run_python("-m", "shardwright", "plugin", "new", name, "--kind", kind, *output)

    done = made("row_wise", "sharding_type")
    assert done.returncode == 1
    assert "the sharding type 'row_wise' is there already: shardwright_plugins." in done.stderr
    assert "'builtin_sharding_types' from shardwright " in done.stderr
    assert "Two of one name cannot be used" in done.stderr
    done = made("plugins", "codec")
    assert done.returncode == 1
    assert "would be shardwright_plugins, and a module of that name is installed already" in done.stderr
    assert not (tmp_path / "out").exists()
    done = made("row_wise", "codec")
    assert done.returncode == 0, done.stderr  # of another kind


def test_new_plugin_of_a_kind_that_was_added_is_written_from_its_row(tmp_path):
    (tmp_path / "__init__.py.txt").write_text("class CLASS:\n    name = 'NAME'\n")
    new = """
from typer.testing import CliRunner
from shardwright_plugins.commands.new_plugin.command import plugin

made = ("new", "adam_like", "--kind", "input_transform", "--output", folder + "/out")
print(CliRunner().invoke(plugin, made).output, CliRunner().invoke(plugin, ["new", "--help"]).output)
"""
    done = run_python("-c", NEW_KIND + new, str(tmp_path), COLUMNS="300")
    assert done.returncode == 0, done.stderr
    assert "input_transform" in done.stdout
    package = tmp_path / "out/shardwright_adam_like/__init__.py"
    assert package.read_text() == "class AdamLike:\n    name = 'adam_like'\n"
    written = (tmp_path / "out/tests/test_adam_like.py").read_text()
    assert "from shardwright_testing import InputTransformTests" in written
