"""The examples: short, of public names alone, and on two ranks they print what their pages show."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import readme, stranger
from tests.contrib import distributions
from tests.ports import own_port

import shardwright as sw
from shardwright.host import PluginHost, use_host

FOLDER = distributions.ROOT / "examples"
SCRIPTS = {path.parent.name: path for path in sorted(FOLDER.glob("*/*.py"))}
NOTEBOOK = FOLDER / "notebook/two_ranks.ipynb"
MOST_LINES = 120
# Example -> distributions of contrib that it needs.
NEEDS = {"two_towers": ["serving"], "hash_tables": ["hash_embedding"]}

_NUMBER = re.compile(r"\d+\.\d+")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed what the examples need."""
    return distributions.install(
        [name for names in NEEDS.values() for name in names], tmp_path_factory.mktemp("site")
    )


def shown(example: str) -> str:
    """What the page of an example says it prints."""
    outputs = [block for block in readme.blocks(FOLDER / example / "README.md") if block.language == "text"]
    return outputs[-1].text


def alike(printed: str, page: str) -> bool:
    """Whether a text is the same but for its numbers, which may differ as two processors do."""
    numbers = [[float(number) for number in _NUMBER.findall(text)] for text in (printed, page)]
    return _NUMBER.sub("#", printed) == _NUMBER.sub("#", page) and numbers[0] == pytest.approx(
        numbers[1], abs=0.02
    )


def test_every_example_has_a_page_that_the_index_lists() -> None:
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir()}
    assert folders == {*SCRIPTS, "notebook"}
    linked = set(re.findall(r"\((\w+)/README\.md\)", (FOLDER / "README.md").read_text()))
    assert linked == folders


@pytest.mark.parametrize("example", SCRIPTS)
def test_script_is_short_and_of_public_names(example: str) -> None:
    source = SCRIPTS[example].read_text()
    assert len(source.splitlines()) <= MOST_LINES
    assert distributions.private_uses(source) == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("example", [name for name in SCRIPTS if name != "custom_type"])
def test_script_on_two_ranks_prints_what_its_page_shows(example: str, tmp_path: Path, site: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = {"dlrm_parquet": [str(tmp_path)], "two_towers": [str(tmp_path / "package")]}
    done = stranger.run_python(*torchrun, str(SCRIPTS[example]), *arguments.get(example, []), site=site)
    assert done.returncode == 0, done.stderr
    assert alike(done.stdout, shown(example)), done.stdout


@pytest.fixture
def by_memory() -> Any:
    """The custom type's script, as a module."""
    spec = importlib.util.spec_from_file_location("by_memory", SCRIPTS["custom_type"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_custom_type_gives_rows_by_memory(by_memory: Any) -> None:
    topology = by_memory.topology_of(FOLDER / "custom_type/hosts.txt")
    constraints = {"*": sw.ParameterConstraints(sharding_types=["by_memory"])}
    with use_host(PluginHost(plugins={"by_memory": by_memory})):
        planner = sw.EmbeddingShardingPlanner(topology, 64, constraints=constraints)
        plan = planner.plan_tables([sw.TableSpec("item", 10_001, 16, ["item"])])
    (placed,) = plan.plan[""].values()
    assert [(shard.shard_offsets[0], shard.shard_sizes[0]) for shard in placed.sharding_spec.shards] == [
        (0, 7500),
        (7500, 2501),
    ]


def test_custom_type_hosts_with_different_slots_are_refused(by_memory: Any, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a slots=1 memory_gib=1\nb slots=2 memory_gib=1\n")
    with pytest.raises(sw.InvalidInputError):
        by_memory.topology_of(hosts)


@pytest.mark.slow
@pytest.mark.distributed
def test_custom_type_on_the_hosts_of_a_file_prints_what_its_page_shows(tmp_path: Path) -> None:
    """A torchrun for each host, of which each is this machine: the stand-in for ssh runs the command here."""
    hosts, page = FOLDER / "custom_type/hosts.txt", FOLDER / "custom_type/README.md"
    assert hosts.read_text().endswith("\n" + readme.source("hosts.txt", page))
    commands = {
        "ssh": 'shift\nexec bash -c "$*"\n',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["./launch.sh", hosts.name, SCRIPTS["custom_type"].name, hosts.name],
        cwd=hosts.parent,
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(own_port()),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown("custom_type")


def cells() -> str:
    """Code of the notebook."""
    document = json.loads(NOTEBOOK.read_text())
    code = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    return "\n".join(code)


def test_notebook_is_of_public_names_and_has_no_outputs() -> None:
    assert distributions.private_uses(cells()) == []
    assert '"outputs": []' in NOTEBOOK.read_text()
    assert all(not cell.get("outputs") for cell in json.loads(NOTEBOOK.read_text())["cells"])


@pytest.mark.slow
@pytest.mark.distributed
def test_notebook_trains_on_two_ranks_as_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text(cells())
    done = stranger.run_python(str(tmp_path / "cells.py"))
    assert done.returncode == 0, done.stderr
    one, two = re.findall(r"^loss (.*)$", done.stdout, re.MULTILINE)
    assert one == two
    assert float(one) < 0.9
    assert done.stdout.endswith("weights differ by at most 1e-5\n")


@pytest.mark.slow
@pytest.mark.distributed
def test_notebook_runs_in_a_kernel() -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=200).execute()
    (last,) = notebook.cells[-1].outputs
    assert last["text"] == "weights differ by at most 1e-5\n"
