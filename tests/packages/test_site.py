"""The site and the pages of reference: every page once, without a warning, with every command, variable and picture."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
from tests import pictures, readme
from tests.pictures import measured
from tests.programs import printed_by

import shardwright as sw
from shardwright.cli import app
from shardwright.host import PluginHost
from shardwright.planning.documents import schemas

ROOT = readme.README.parent
FOLDERS = ("core/shardwright/docs", "plugins/shardwright_plugins/docs", "contrib")
# Of what a browser fetches by itself; links that a reader follows may lead elsewhere.
LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]* src=\"?(https?:)?//|<link[^>]* href=\"?(https?:)?//[^>]*stylesheet"
)


def test_site_has_every_page_once_in_its_navigation() -> None:
    shown = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT)) for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")}
    assert sorted(shown) == sorted(pages | {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"})


@pytest.mark.slow
def test_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra `docs` is not installed")
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    printed_by("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path, cwd=ROOT, env=quiet)
    made = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert [path.name for path, text in made.items() if LOADED.search(text)] == []
    notebook = re.sub(r"<[^>]+>", "", made[tmp_path / "contrib/examples/notebook.html"])
    assert "cluster_plan = planner.plan_tables(tables)" in notebook
    commands = re.sub(r"<[^>]+>", "", made[tmp_path / "reference/environment.html"])
    assert "--storage-estimator" in commands  # of a command of core; and, of a plugin's:
    assert "--finals" in commands
    constraints = made[tmp_path / "reference/planning.html"]
    assert 'id="shardwright.ParameterConstraints"' in constraints
    shown = re.sub(r"<[^>]+>", "", constraints)
    assert re.search(r"ranks:\s+int\s+\|\s+Iterable\[int\]\s+\|\s+None\s+=\s+None", shown)


PAGE = (readme.CORE_DOCS / "reference/environment.md").read_text()
DOCUMENTS = (readme.CORE_DOCS / "documents.md").read_text()
_VARIABLE = re.compile(r"\bSHARDWRIGHT_[A-Z_]+[A-Z]\b")


def sources() -> list[Path]:
    root = readme.README.parent
    return [path for folder in ("core", "plugins") for path in (root / folder).rglob("*.py")]


def test_page_of_commands_has_every_command() -> None:
    own = {command.callback.__name__ for command in app.registered_commands if command.callback}
    of_plugins = {
        entry.name.removeprefix("command:")
        for record in PluginHost(environment={}).plugins
        if record.provenance.distribution == "shardwright"
        for entry in record.entries.get("shardwright_extensions", ())
        if entry.name.startswith("command:")
    }
    assert len(own) >= 2
    assert len(of_plugins) >= 9
    listed = re.findall(r"^\| `shardwright ([a-z ]+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted([*own, *of_plugins - {"plugin"}, "plugin new"])


def test_page_of_variables_has_every_variable_that_is_read() -> None:
    read = {name for path in sources() for name in _VARIABLE.findall(path.read_text())}
    assert len(read) >= 6
    assert set(re.findall(r"^\| `(SHARDWRIGHT_\w+)", PAGE, re.MULTILINE)) == read


def test_page_of_documents_has_every_key_of_the_schemas() -> None:
    for path in Path(schemas.FOLDER).glob("*.schema.json"):
        keys = json.loads(path.read_text()).get("properties", {})
        assert [key for key in keys if key not in DOCUMENTS] == [], path.name


_TEXT = re.compile(r"<text [^>]*>([^<]+)</text>")


def test_every_picture_is_shown_on_a_page() -> None:
    root = readme.README.parent
    pages = "".join(
        page.read_text() for folder in ("core", "plugins") for page in (root / folder).rglob("*.md")
    )
    names = {path.name for path in pictures.PICTURES.iterdir()}
    assert names == {"report.svg", "measured.svg", "timeline.svg"}
    assert {name for name in names if f"pictures/{name})" in pages} == names


def test_pictures_are_what_the_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in pictures.draw(tmp_path):
        drawn, kept = (_TEXT.findall(one.read_text()) for one in (path, pictures.PICTURES / path.name))
        assert len(kept) > 15
        assert drawn == kept, path.name


def test_timeline_has_the_stages_of_the_pipeline_on_both_ranks() -> None:
    stages = {stage.name for stage in sw.TrainPipelineSparseDist.stages()}
    for spans in json.loads(pictures.TIMELINE.read_text())["ranks"]:
        assert {span["stage"] for span in spans} == {*stages, "next batch"}
        assert all(0 <= span["start_ms"] <= span["end_ms"] for span in spans)


def test_measured_plans_have_a_time_by_each_estimator() -> None:
    data = json.loads(pictures.MEASURED.read_text())
    assert len(data["plans"]) >= 6
    assert {tuple(plan["predicted_ms"]) for plan in data["plans"]} == {tuple(data["estimators"])}


def test_reduced_truth_keeps_the_times_of_each_plan() -> None:
    plan = {"step_ms": 2.0, "predicted": {"roofline": {"step_ms": 1.5, "phases_ms": {}}}, "plan": "{}"}
    settings = {"estimators": ["roofline"], "ranks": 2}
    workload = {"workload": {"name": "drawn_0", "tables": []}, "plans": [plan]}
    kept = measured.reduced({"processor": "AMD EPYC", "settings": settings, "workloads": [workload]})
    assert kept["plans"] == [{"measured_ms": 2.0, "predicted_ms": {"roofline": 1.5}}]
    assert (kept["workload"], kept["estimators"]) == ("drawn_0", ["roofline"])
