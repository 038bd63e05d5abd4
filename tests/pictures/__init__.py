"""Pictures of the pages, drawn from the tutorial's plan and from measurements that are kept beside this file.

`python -m tests.pictures` draws them. `measured.py` and `timeline.py` say how their numbers are measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests import readme

import shardwright as sw
from shardwright_plugins.reports.html.page import _Report

PICTURES = readme.CORE_DOCS / "pictures"
MEASURED = Path(__file__).with_name("measured.json")
TIMELINE = Path(__file__).with_name("timeline.json")
GIB = 1024**3
_TUTORIAL = readme.CORE_DOCS / "tutorials/plan_a_cluster.md"
_COLOURS = ("#4878a8", "#e49444", "#5b9e5b", "#b8504c", "#8a6bb0", "#857264", "#d37bb0", "#777777")


def draw(folder: Path) -> list[Path]:
    """Draw all pictures into a folder; the same measurements give the same files."""
    import matplotlib as mpl

    mpl.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context({"svg.hashsalt": "shardwright", "svg.fonttype": "none", "font.size": 9}):
        for name, make in _MAKERS.items():
            figure = make()
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
            written.append(path)
    return written


def tutorial_report() -> Mapping[str, Any]:
    """Data of the report of the tutorial's plan for 8 GPUs of 16 GiB."""
    tables = sw.Workload.from_data(json.loads(readme.source("feed.json", _TUTORIAL))).tables
    topology = sw.Topology(8, "cuda", hbm_cap=16 * GIB, local_world_size=8)
    planner = sw.EmbeddingShardingPlanner(topology, batch_size=4096)
    planner.plan_tables(tables)
    assert planner.report is not None
    return planner.report.to_data()


def _report() -> Any:
    """Charts of the HTML report: time and memory of each rank, by sharding type."""
    charts = list(_Report(tutorial_report()).rank_charts())
    figure, all_axes = _axes(columns=len(charts), height=2.6)
    for chart, axes in zip(charts, all_axes, strict=True):
        below = 0 * chart.heights[0]
        for group, colour, heights in zip(chart.groups, chart.colours, chart.heights, strict=True):
            scaled = heights / chart.scale.unit
            axes.bar(range(len(scaled)), scaled, bottom=below, color=colour, label=group)
            below = below + scaled
        for text, height in chart.limits:
            axes.axhline(
                height / chart.scale.unit, linestyle="--", color="#333333", linewidth=0.8, label=text
            )
        axes.set(title=chart.title, xlabel="rank", ylabel=chart.scale.name, xticks=range(len(chart.bars)))
        axes.set_ylim(0, chart.top / chart.scale.unit)
        axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


def _measured() -> Any:
    """Predicted and measured times of plans, one panel an estimator."""
    from matplotlib.ticker import FixedLocator, NullLocator

    data = json.loads(MEASURED.read_text())
    figure, all_axes = _axes(columns=len(data["estimators"]), height=2.8)
    times = [time for plan in data["plans"] for time in (plan["measured_ms"], *plan["predicted_ms"].values())]
    ends = min(times) / 1.2, max(times) * 1.2
    for name, axes in zip(data["estimators"], all_axes, strict=True):
        predicted = [plan["predicted_ms"][name] for plan in data["plans"]]
        axes.loglog(ends, ends, color="#999999", linewidth=0.8)
        axes.scatter(predicted, [plan["measured_ms"] for plan in data["plans"]], s=14, color=_COLOURS[0])
        axes.set(title=name, xlabel="predicted, ms", ylabel="measured, ms", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([10, 20, 50, 100]))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
    return figure


def _timeline() -> Any:
    """Stages of a pipeline in time, two lines a rank: the step's own stages, and those of the next batch."""
    data = json.loads(TIMELINE.read_text())
    figure, (axes,) = _axes(columns=1, height=2.6)
    colours: dict[str, str] = {}
    for rank, spans in enumerate(data["ranks"]):
        for span in spans:
            stage, is_next = (
                span["stage"],
                span["stage"] in ("copy to device", "exchange headers", "exchange ids"),
            )
            if stage in ("next batch", "zero grad", "copy to device"):
                continue  # too short to be seen, or the sum of others
            label = None if stage in colours else stage
            colour = colours.setdefault(stage, _COLOURS[len(colours)])
            width = span["end_ms"] - span["start_ms"]
            axes.barh(2 * rank + is_next, width, left=span["start_ms"], color=colour, label=label, height=0.8)
    axes.set(xlabel="ms", title="Three steps of TrainPipelineSparseDist on two ranks")
    axes.set_yticks(
        range(4), [f"rank {rank}: {what}" for rank in (0, 1) for what in ("this batch", "next batch")]
    )
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


def _axes(*, columns: int, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 2.6 * columns), height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


_MAKERS: Mapping[str, Callable[[], Any]] = {"report": _report, "measured": _measured, "timeline": _timeline}
