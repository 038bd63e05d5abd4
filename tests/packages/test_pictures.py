"""Pictures of the pages: each is shown, and is what its command draws of the plan and the measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests import pictures, readme
from tests.pictures import measured

import shardwright as sw

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
