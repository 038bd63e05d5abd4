from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser

import attrs
import numpy as np
import pytest

from shardwright import EmbeddingShardingPlanner, ParameterConstraints, Proven, TableSpec, Topology

TABLES = [TableSpec(f"t{i}", 10 * (i + 1), 8, [f"f{i}"]) for i in range(20)] + [
    TableSpec("<script>alert('&')</script>", 100, 8, ["g"])
]
VOID = {"meta"}


def report_of(ranks=3, tables=TABLES, **arguments):
    planner = EmbeddingShardingPlanner(
        Topology(ranks, "cuda", hbm_cap=1 << 30), **{"proposer": "greedy", **arguments}
    )
    planner.plan_tables(tables)
    return planner.report


class Page(HTMLParser):
    """Reads a page: the bars of each figure, its texts and tags; fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.bars, self.notes, self.tags, self.texts = {}, {}, [], []
        self._open, self._figure, self._colour = [], "", ""
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag == "figure":
            self._figure = attributes["id"]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag == "path":
            self.bars.setdefault(self._figure, []).extend(rectangles(attributes["d"], attributes["fill"]))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self._open[-1:] == ["title"] and self._figure:
            self.notes.setdefault(self._figure, []).append(data)


def rectangles(drawn, colour):
    """The bars of a path: x, y, width, height and colour of each."""
    found = re.findall(r"M([\d.]+) (-?[\d.]+)h([\d.]+)v([\d.]+)h-\3z", drawn)
    assert len(found) == drawn.count("M")
    return [
        dict(zip(("x", "y", "width", "height"), map(float, numbers), strict=True), colour=colour)
        for numbers in found
    ]


def heights_of(bars):
    """The height of each bar, all colours together, by its place."""
    heights = {}
    for bar in bars:
        heights[round(bar["x"])] = heights.get(round(bar["x"]), 0.0) + bar["height"]
    return heights


def test_html_report_bars_are_as_high_as_the_ranks_loads():
    report = report_of()
    bars = Page(report.to_format("html")).bars
    for picture, values in (
        ("time", report.plan.load_ms),
        ("memory-hbm", report.plan.used_bytes[:, 0]),
    ):
        heights = heights_of(bars[picture])
        drawn = np.array([heights[x] for x in sorted(heights)])
        np.testing.assert_allclose(drawn / drawn.max(), values[values > 0] / values.max(), atol=0.005)


def with_bound(report, bound_ms):
    return attrs.evolve(report, result=attrs.evolve(report.result, proven=Proven(bound_ms)))


BY = "checked by arithmetic alone"


def test_html_report_begins_with_how_good_the_plan_is():
    report = report_of()
    value = report.plan.value_ms
    assumed = [name for name, data in report.inputs.items() if data["provenance"] == "assumed"]
    best = with_bound(report, value)
    assert best.headline == f"fits; {value:.4g} ms; proven best under {len(assumed)} assumed values ({BY})"
    assert report.headline in Page(report.to_format("html")).texts
    assert str(report).splitlines()[1] == report.headline
    assert (report.to_data()["headline"], report.to_data()["num_assumed"]) == (report.headline, len(assumed))
    unproven = with_bound(report, 0.0)
    assert unproven.headline.endswith("; no bound proven")
    near = with_bound(report, value / 1.00251)
    assert near.headline.endswith(f"; proven within 0.26 % under {len(assumed)} assumed values ({BY})")


def test_html_report_needs_nothing_from_elsewhere_and_names_are_escaped():
    text = report_of().to_format("html", "a <b> title")
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert not {"link", "img", "iframe", "object"} & set(tags)
    assert tags.count("script") == 1
    assert not any({"src", "href", "srcset"} & set(attributes) for _, attributes in page.tags)
    assert not re.search(r"https?:|url\(|import|fetch|XMLHttp", text)
    assert any("default-src 'none'" in attributes.get("content", "") for _, attributes in page.tags)
    assert "<script>alert('&')</script>" in page.texts
    assert "a <b> title" in page.texts


@pytest.mark.parametrize("ranks", [1, 64, 130])
def test_html_report_of_any_number_of_ranks_stays_within_the_picture(ranks):
    rules = {"*": ParameterConstraints(sharding_types=["row_wise"])}
    for name, bars in Page(report_of(ranks, constraints=rules).to_format("html")).bars.items():
        width = ranks if name in ("time", "memory-hbm") else 64
        assert all(bar["x"] + bar["width"] <= width + 0.01 and -0.01 <= bar["y"] <= 100 for bar in bars)


def browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


PROBE = """<script>
  const table = document.querySelector("#tables"), rows = () => [...table.tBodies[0].rows];
  const shown = () => rows().filter((row) => !row.hidden);
  const names = () => rows().slice(0, 3).map((row) => row.cells[0].textContent);
  const column = (name) => [...table.querySelectorAll("th button")].find((head) => head.textContent === name);
  const box = table.closest(".scroll").previousElementSibling.querySelector("input");
  const found = {all: shown().length};
  box.value = "T1 row_wise"; box.dispatchEvent(new Event("input"));
  found.searched = shown().length;
  box.value = ""; box.dispatchEvent(new Event("input"));
  column("rows").click(); found.falling = names();
  column("rows").click(); found.rising = names();
  column("table").click(); found.named = names();
  found.sort = table.querySelector("th").getAttribute("aria-sort");
  const small = [...document.querySelectorAll(".plot span, .x span, td, th, p, dd, dt, figcaption")]
    .filter((part) => parseFloat(getComputedStyle(part).fontSize) < 11).length;
  const colours = getComputedStyle(document.querySelector("th"));
  Object.assign(found, {
    bars: document.querySelector("#time path").getBoundingClientRect().height > 20,
    drawn: [...document.querySelectorAll("svg")].map((s) => s.getBoundingClientRect().width > 200),
    wide: document.documentElement.scrollWidth > window.innerWidth, small,
    dark: colours.backgroundColor !== "rgb(255, 255, 255)" && colours.color !== "rgb(0, 0, 0)"});
  document.title = JSON.stringify(found);
</script>"""


@pytest.mark.skipif(browser() is None, reason="no Chromium on the PATH (apt-get install chromium)")
@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), pytest.param(500, False, marks=pytest.mark.slow), (500, True)]
)
def test_html_report_in_a_browser_sorts_searches_and_is_legible(tmp_path, width, dark):
    rules = {
        "t?": ParameterConstraints(sharding_types=["table_wise"]),
        "*": ParameterConstraints(sharding_types=["row_wise"]),
    }
    page = tmp_path / "report.html"
    # The page measures itself: a script is added to this copy only.
    page.write_text(report_of(constraints=rules).to_format("html").replace("</body>", PROBE + "</body>"))
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    arguments += ["--blink-settings=preferredColorScheme=0"] if dark else []
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [str(browser()), *arguments, profile, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(unescape(done.stdout.partition("<title>")[2].partition("</title>")[0]))
    assert told == {
        "all": len(TABLES),
        "searched": 10,  # t10 to t19; t1 is table_wise
        "falling": ["t19", "t18", "t17"],
        "rising": ["t0", "t1", "t2"],
        "named": ["<script>alert('&')</script>", "t0", "t1"],
        "sort": "ascending",
        "bars": True,
        "drawn": [True] * 4,
        "wide": False,
        "small": 0,
        "dark": dark,
    }
