"""What the pages show is so: pictures, collectives, code, contracts, and where it points."""

from __future__ import annotations

import doctest
import os
import re
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tests import readme, stranger
from tests.benchmarks import step_ratios
from tests.pictures.layouts import drawings
from tests.plugins import author_pages
from tests.programs import printed_by

import shardwright
import shardwright_plugins
import shardwright_testing as testing
from shardwright import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ParameterSharding,
    ShardingEnv,
    Topology,
)
from shardwright.hookspecs import KINDS
from shardwright.host import PluginHost
from shardwright.planning.options.options import Options
from shardwright_testing.simulated import run_simulated

DOCS = Path(shardwright_plugins.__file__).parent / "docs"
CORE_DOCS = Path(shardwright.__file__).parent / "docs"
ENGINE, PIPELINES = CORE_DOCS / "engine.md", DOCS / "pipelines.md"
DATAFLOW = CORE_DOCS / "authors" / "dataflow.md"
OWN_SHARDER = DATAFLOW.with_name("sharder.md")
SERVING = CORE_DOCS / "serving.md"
TYPES, PERFORMANCE = DOCS / "sharding_types.md", DOCS / "performance.md"
PAGES = sorted([*DOCS.rglob("*.md"), *CORE_DOCS.rglob("*.md")])
OF_CONTRIB = sorted((readme.README.parent / "contrib").rglob("*.md"))
AT_THE_TOP = [readme.README.with_name(f"{name}.md") for name in ("README", "CHANGELOG", "CONTRIBUTING")]
PICTURE = "layout "
SCRIPTS = {
    "howto/update_in_step.md": "train_in_step.py",
    "howto/reshard.md": "reshard_rows.py",
    "howto/batch_sizes.md": "ranked_items.py",
    "pipelines.md": "stages.py",
}
"""Pages of one script each, with what it prints."""
CODE = ["acme_clipped.py", "acme_clipped_path.py", "train_clipped.py"]
OF_SHARDER = ["acme_hashed.py", "acme_hashed_sharder.py", "acme_hashed_plugin.py", "train_hashed.py"]

_COLLECTIVES = re.compile(r"^\| (?P<dataflow>\w+) \| (?P<labels>headers, .*) \|$", re.MULTILINE)
_COMMAND = re.compile(r"`python (?P<script>tests/benchmarks/\w+\.py)(?P<words>[^`]*)`")
_BENCHMARK = re.compile(
    r"`python (?P<words>(-m tests\.benchmarks[\w.]*|tests/benchmarks/[\w/]+\.py)( [a-z]+(?=[ `]))?)"
)
_LINK = re.compile(r"\]\((?P<target>[^)#:]+)(#[^)]*)?\)")
SHARDER = EmbeddingBagCollectionSharder({"optimizer": "sgd", "learning_rate": 0.1})


def built_in_types() -> list[str]:
    records = PluginHost(environment={}).plugins
    own = [record for record in records if record.provenance.distribution == "shardwright"]
    return sorted(
        entry.name for record in own for entry in record.entries.get("shardwright_sharding_types", ())
    )


def test_docs_types_have_a_picture_of_every_built_in_type() -> None:
    pictures = [block.name for block in readme.blocks(TYPES) if block.name.startswith(PICTURE)]
    assert sorted(pictures) == [PICTURE + name for name in built_in_types()]


@pytest.mark.parametrize("name", built_in_types())
def test_docs_types_picture_is_what_the_layouts_draw(name: str) -> None:
    drawn = drawings(name)
    assert readme.source(PICTURE + name, TYPES) == drawn + "\n", (
        f"`python -m tests.pictures.layouts {name}` now draws what the page does not have:\n{drawn}"
    )


def step_labels(name: str) -> tuple[str, list[str]]:
    """The dataflow of a type and the collectives of a training step on 2 hosts of 2 ranks."""
    config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=8, feature_names=["f"])
    module = EmbeddingBagCollection([config])
    constraint = ParameterConstraints(sharding_types=[name], min_partition=4)
    topology = Topology(world_size=4, compute_device="cpu", local_world_size=2)
    planner = EmbeddingShardingPlanner(topology=topology, constraints={"t": constraint}, batch_size=2)
    shardings: Any = planner.plan(module, [SHARDER]).plan[""]

    def work(env: ShardingEnv) -> list[str]:
        sharded = SHARDER.shard(module, shardings, env, "cpu")
        features = KeyedJaggedTensor(
            keys=["f"], values=torch.tensor([0, 7]) // (env.rank + 1), lengths=torch.tensor([1, 1])
        )
        labels = env.communicator.labels  # type: ignore[attr-defined]  # of simulated ranks
        first = len(labels)
        sharded(features).values().sum().backward()
        return labels[first:]

    (labels,) = {tuple(own) for own in run_simulated(work, 4, local_world_size=2)}
    sharding: ParameterSharding = shardings["t"]
    return sharding.layout.dataflow.name, list(labels)


@pytest.mark.parametrize("name", built_in_types())
def test_docs_engine_collectives_are_those_that_a_step_makes(name: str) -> None:
    told = {row["dataflow"]: row["labels"].split(", ") for row in _COLLECTIVES.finditer(ENGINE.read_text())}
    dataflow, labels = step_labels(name)
    assert told[dataflow] == labels


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPTS)
def test_docs_script_runs_as_the_page_shows(page: str, tmp_path: Path) -> None:
    path, script = (
        next(folder / page for folder in (CORE_DOCS, DOCS) if (folder / page).exists()),
        SCRIPTS[page],
    )
    assert [block.name for block in readme.blocks(path) if block.language == "python"] == [script]
    (tmp_path / script).write_text(readme.source(script, path))
    done = stranger.run_python(str(tmp_path / script))
    assert done.returncode == 0, done.stderr
    assert done.stdout == readme.output_of(script, path)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "files"), [(DATAFLOW, CODE), (OWN_SHARDER, OF_SHARDER)])
def test_docs_programs_of_several_files_print_what_the_page_shows(
    tmp_path: Path, page: Path, files: list[str]
) -> None:
    for name in files:
        (tmp_path / name).write_text(readme.source(name, page))
    done = stranger.run_python(str(tmp_path / files[-1]))
    assert done.returncode == 0, done.stderr
    assert done.stdout == readme.output_of(files[-1], page)


def test_docs_pipelines_list_the_stages_of_each() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \|$", PIPELINES.read_text(), re.MULTILINE))
    assert len(listed) == 4
    for name, stages in listed.items():
        assert stages == ", ".join(stage.name for stage in getattr(shardwright, name).stages())


def test_docs_serving_plan_is_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme.check_output("serving_plan.py", SERVING, tmp_path, capsys)


def test_docs_dataflow_in_a_plan_survives_a_round_trip(tmp_path: Path) -> None:
    (tmp_path / CODE[0]).write_text(readme.source(CODE[0], DATAFLOW))
    script = """
import sys, acme_clipped, shardwright as sw
from shardwright.host import PluginHost, use_host
with use_host(PluginHost(plugins={"acme_clipped": acme_clipped})):
    constraints = {"*": sw.ParameterConstraints(sharding_types=["clipped_rows"])}
    topology = sw.Topology(world_size=2, compute_device="cpu")
    planner = sw.EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=4)
    plan = planner.plan_tables([sw.TableSpec("t", 10, 4, ["f"])])
    assert sw.ShardingPlan.from_json(plan.to_json()) == plan
    print(plan.plan[""]["t"].layout.dataflow, "torch" in sys.modules)
"""
    done = stranger.run_python("-c", script, site=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ClippedExchange(limit=0.5) False\n"


def rows_below(heading: str) -> dict[str, list[str]]:
    """The cells of the rows of the first table below a heading of the page on performance, by the first cell."""
    _, _, section = PERFORMANCE.read_text().partition(f"## {heading}\n")
    table = re.search(r"^\|.*?(?=^$)", section, re.MULTILINE | re.DOTALL)
    assert table, heading
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table[0].splitlines()[2:]]
    return {first: others for first, *others in cells}


def test_docs_performance_has_every_case_with_a_goal_and_its_ratio() -> None:
    told = rows_below("Beside TorchRec")
    assert list(told) == [case.name for case in step_ratios.BESIDE]
    for case, (ours, theirs, ratio, goal, collectives) in zip(step_ratios.BESIDE, told.values(), strict=True):
        assert float(goal) == case.goal
        assert float(ratio) == pytest.approx(float(ours) / float(theirs), abs=0.011)
        if case.max_collectives is not None:
            assert int(collectives.split(" / ")[0]) <= case.max_collectives


def test_docs_performance_commands_are_scripts_with_these_options() -> None:
    commands = list(_COMMAND.finditer(PERFORMANCE.read_text()))
    assert {Path(match["script"]).name for match in commands} >= {
        "step_ratios.py",
        "lookup.py",
    }
    for match in commands:
        script = readme.README.parent / match["script"]
        assert script.exists(), match[0]
        text = script.read_text().split('"""', 2)[2].replace("_", "-")  # what follows the docstring
        for option in re.findall(r"--([\w-]+)", match["words"]):
            assert option in text, f"{match[0]}: no --{option}"


@pytest.mark.parametrize(
    "page", [*AT_THE_TOP, *PAGES, *OF_CONTRIB], ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_docs_links_lead_to_files_and_to_pages_of_the_site(page: Path) -> None:
    targets = [(page.parent / match["target"]).resolve() for match in _LINK.finditer(page.read_text())]
    assert [target for target in targets if not target.exists()] == []
    pages = {path for path in targets if path.suffix == ".md"}
    assert pages - {path.resolve() for path in (*AT_THE_TOP, *PAGES, *OF_CONTRIB)} == set()


BENCHMARKS = sorted({match["words"] for page in PAGES for match in _BENCHMARK.finditer(page.read_text())})


@pytest.mark.slow
@pytest.mark.parametrize("words", BENCHMARKS)
def test_docs_benchmarks_start(words: str) -> None:
    # With all that is importable here, distributions of contrib that are not installed among it.
    done = stranger.run_python(*words.split(), "--help", PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["averages.py", "export.py"])
def test_docs_training_loops_examples_run(tmp_path: Path, name: str) -> None:
    page = CORE_DOCS / "training_loops.md"
    (tmp_path / name).write_text(readme.source(name, page))
    done = stranger.run_python(str(tmp_path / name))
    assert done.returncode == 0, done.stderr
    assert name == "averages.py" or done.stdout == readme.output_of(name, page)


NAMES = sorted(author_pages.PAGES)
OTHER_PAGES = {"dataflow", "plugins", "row_index", "rows_in_checkpoints", "sharder", "versions"}  # of no kind
VERSIONS = author_pages.FOLDER / "versions.md"
TEMPLATES = Path(shardwright_plugins.__file__).parent / "commands/new_plugin/templates"
TAUGHT = sorted([*author_pages.FOLDER.glob("*.md"), *TEMPLATES.glob("*/__init__.py.txt")])


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a page's example, importable during the test."""
    for block in readme.blocks(author_pages.page(request.param)):
        if block.name.endswith(".py"):
            (tmp_path / block.name).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    for path in tmp_path.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return tmp_path


def test_each_kind_has_a_page_and_each_page_a_kind() -> None:
    pages = {path.stem for path in author_pages.FOLDER.glob("*.md")} - OTHER_PAGES
    assert pages == set(NAMES)
    assert len(NAMES) == len(KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_page_contract_is_that_of_the_code(name: str) -> None:
    """A contract that changes changes what `api` promises: versions.md, then `python -m tests.plugins.author_pages`."""
    page = author_pages.page(name)
    contract = author_pages.contract_text(author_pages.PAGES[name].contract)
    assert readme.source("contract", page) == contract


@pytest.mark.parametrize("name", NAMES)
def test_page_has_its_parts(name: str) -> None:
    text = author_pages.page(name).read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    shown = "## On the command line" if name == "extension" else "## In plan and report"
    assert headings == ["## The contract", "## An example", shown, "## How to test it"]
    (kit,) = [name for name in testing.__all__ if name.endswith("Tests") and f"({name})" in text]
    assert kit.removesuffix("Tests") == author_pages.PAGES[name].contract.__name__


@pytest.mark.parametrize(("name", "example"), [(name, name) for name in NAMES], indirect=["example"])
def test_page_example_does_as_the_page_shows(name: str, example: Path) -> None:
    (shown,) = [block.text for block in readme.blocks(author_pages.page(name)) if block.language == "pycon"]
    test = doctest.DocTestParser().get_doctest(shown, {}, name, str(author_pages.page(name)), 0)
    assert len(test.examples) > 3
    told: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert result.failed == 0, "".join(told)


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "example"), [(name, name) for name in NAMES], indirect=["example"])
@pytest.mark.slow
def test_page_example_passes_the_kit(name: str, example: Path) -> None:
    path = os.pathsep.join([str(example), *filter(None, sys.path)])
    (tests,) = example.glob("test_acme_*.py")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    assert " passed" in printed_by(*command, cwd=example, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("path", TAUGHT, ids=lambda path: path.parent.name + "/" + path.name)
def test_what_authors_are_taught_of_options_is_there(path: Path) -> None:
    taught = set(re.findall(r"\boptions\.([a-z]\w*)", path.read_text()))
    known = {*dir(Options), *(field.name for field in attrs.fields(Options))}
    assert taught <= known


def test_versions_name_the_version_of_the_contracts() -> None:
    versions = {kind.contract.api for kind in KINDS}
    assert f"`api = {versions.pop()}`" in VERSIONS.read_text()
    assert not versions
