from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

from shardwright.planning.constraints import ParameterConstraints
from shardwright.planning.planner import EmbeddingShardingPlanner
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology

TABLES = [TableSpec(f"t{i}", 10 * (i + 1), 8, [f"f{i}"]) for i in range(20)] + [
    TableSpec("<script>alert('&')</script>", 100, 8, ["g"])
]
VOID = {"meta", "line", "rect"}


def report_of(ranks=3, tables=TABLES, **arguments):
    planner = EmbeddingShardingPlanner(Topology(ranks, "cuda", hbm_cap=100_000), **arguments)
    planner.plan_tables(tables)
    return planner.report


class Page(HTMLParser):
    """Reads a page: the bars by picture, its texts and tags; fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.bars, self.tags, self.texts, self._open, self._picture = {}, [], [], [], ""
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "svg":
            self._picture = dict(attributes)["id"]
        if tag == "rect":
            self.bars.setdefault(self._picture, []).append(
                {name: float(value) for name, value in attributes if name in ("x", "y", "width", "height")}
            )
        if tag not in VOID or tag == "rect":
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_report_bars_are_as_high_as_the_ranks_loads():
    report = report_of()
    bars = Page(report.to_html()).bars
    for picture, values in (
        ("time", report.statistics.time_ms),
        ("memory-hbm", report.statistics.used_bytes[:, 0]),
    ):
        heights = {}
        for bar in bars[picture]:
            heights[bar["x"]] = heights.get(bar["x"], 0.0) + bar["height"]
        drawn = np.array([heights[x] for x in sorted(heights)])
        np.testing.assert_allclose(drawn / drawn.max(), values[values > 0] / values.max(), atol=0.005)


def test_html_report_bars_of_a_rank_are_stacked_without_gaps():
    columns = {}
    for bar in Page(report_of().to_html()).bars["time"]:
        columns.setdefault(bar["x"], []).append((bar["y"], bar["y"] + bar["height"]))
    for spans in columns.values():
        spans.sort()
        assert all(abs(low[1] - high[0]) < 0.05 for low, high in pairwise(spans))


def test_html_report_needs_nothing_from_elsewhere_and_names_are_escaped():
    text = report_of().to_html("a <b> title")
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.tags)
    assert "<script>alert('&')</script>" in page.texts
    assert "a <b> title" in page.texts


def test_html_report_has_all_ranks_tables_and_assumptions():
    report = report_of()
    texts = Page(report.to_html()).texts
    assert {table.path for table in TABLES} <= set(texts)
    assert any("ddr_cap = 128.0 GiB" in text for text in texts)
    assert any("proposals tried" in text for text in texts)


@pytest.mark.parametrize("ranks", [1, 64, 130])
def test_html_report_of_any_number_of_ranks_stays_within_the_picture(ranks):
    rules = {"*": ParameterConstraints(sharding_types=["slices"])}
    for bars in Page(report_of(ranks, constraints=rules).to_html()).bars.values():
        assert all(bar["x"] + bar["width"] <= 1000.01 and 0 <= bar["y"] <= 300 for bar in bars)


def browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium on the PATH (apt-get install chromium)")
def test_html_report_in_a_browser_draws_its_pictures(tmp_path):
    page = tmp_path / "report.html"
    page.write_text(report_of().to_html())
    # The page measures itself: a script is added to this copy only.
    probe = """<script>document.title = JSON.stringify({
      bars: [...document.querySelectorAll('#time rect')].filter(r => r.getBoundingClientRect().height > 0).length,
      drawn: [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width > 200),
      wide: document.documentElement.scrollWidth > window.innerWidth,
      rows: document.querySelectorAll('tbody tr').length})</script>"""
    page.write_text(page.read_text().replace("</body>", probe + "</body>"))
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [str(browser()), *arguments, profile, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    assert '"drawn":[true,true]' in title
    assert '"wide":false' in title
    assert f'"rows":{3 + len(TABLES)}' in title
    assert '"bars":0' not in title
