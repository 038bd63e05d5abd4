"""What the README shows is run, and what it lists is there. Its plugin is trained in distributed/test_stranger.py."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
from tests import readme, stranger

from shardwright.hookspecs import KINDS
from shardwright.host import PluginHost

GROUPS = readme.CORE_DOCS.parents[2] / "plugins/shardwright_plugins/docs/sharding_groups.md"
PLUGIN = readme.CORE_DOCS / "tutorials/first_plugin.md"
MOST_LINES = 250


def test_readme_python_blocks_are_all_run() -> None:
    names = [block.name for block in readme.blocks() if block.language == "python"]
    assert names == ["train.py", "acme_even_first.py"]


def test_readme_is_short() -> None:
    assert len(readme.README.read_text().splitlines()) <= MOST_LINES


@pytest.mark.distributed
@pytest.mark.slow
def test_readme_example_on_two_ranks_prints_what_it_shows(tmp_path: Path) -> None:
    if importlib.util.find_spec("numba") is None:
        pytest.skip("the README shows the output with Numba, which the extra `cpu` brings")
    script = tmp_path / "train.py"
    script.write_text(readme.source("train.py"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = stranger.run_python(*torchrun, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout == readme.output_of("train.py")


@pytest.mark.slow  # four processes that import torch
@pytest.mark.distributed
def test_page_of_sharding_groups_on_four_ranks_prints_what_it_shows(tmp_path: Path) -> None:
    script = tmp_path / "groups.py"
    script.write_text(readme.source("groups.py", GROUPS))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = stranger.run_python(*torchrun, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout == readme.output_of("groups.py", GROUPS)


def test_plugin_tutorial_plans_what_it_shows(tmp_path: Path) -> None:
    script = tmp_path / "plan.py"
    script.write_text(readme.source("plan.py", PLUGIN))
    done = stranger.run_python(str(script), site=stranger.install(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == readme.output_of("plan.py", PLUGIN)


@pytest.mark.slow  # a whole conformance kit in a process of its own
def test_plugin_tutorial_test_passes(tmp_path: Path) -> None:
    site, test = stranger.install(tmp_path), tmp_path / "test_even_first.py"
    test.write_text(readme.source("test_even_first.py", PLUGIN))
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(test)]
    done = stranger.run_python("-m", "pytest", *options, site=site)
    assert done.returncode == 0, done.stdout[-4000:]


def test_table_of_built_ins_has_each_once_and_no_other() -> None:
    offered = [
        (kind.title, entry.name)
        for record in PluginHost(environment={}).plugins
        if record.provenance.distribution == "shardwright"
        for kind in KINDS
        for entry in record.entries.get(kind.hook, ())
    ]
    assert Counter(readme.built_ins()) == Counter(offered)


def test_readme_commands_are_those_of_the_project() -> None:
    commands = [block.text.strip() for block in readme.blocks() if block.language == "bash"]
    assert commands == [
        "pip install -e '.[cpu,demo]' && shardwright demo",
        "pip install -e '.[cpu,test]' && pytest",
    ]
