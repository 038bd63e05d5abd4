"""The report as a page of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any


def page_of(report: Mapping[str, Any]) -> str:
    """The page of a report's data."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"# GPU report: {report['device'] or 'no CUDA device'}"
    yield ""
    yield f"{report['seconds']:.0f} s. {report['note']}".strip()
    if report["missing"]:
        yield f"Missing modules, without which less runs: {', '.join(report['missing'])}."
    yield from _machine(report["sections"].get("machine", {}))
    yield from _kernels(report["sections"].get("kernels", {}))
    yield from _steps(report["sections"].get("steps", {}))
    if demo := report["sections"].get("demo"):
        yield from ("", "## Demo", "", demo["speed"] or f"not run: {demo['problem']}")
    yield from _tests(report["tests"])


def _machine(section: Mapping[str, Any]) -> Iterator[str]:
    if section.get("findings"):
        yield from ("", "## Machine", "", "| part | name | found | |", "|---|---|---|---|")
        for one in section["findings"]:
            yield f"| {one['part']} | {one['name']} | {one['found']} | {one['reason']} |"


def _kernels(section: Mapping[str, Any]) -> Iterator[str]:
    if not section:
        return
    yield from (
        "",
        "## Kernels",
        "",
        "Goals: lookup 80 %, update 60 % of the bandwidth of copies on the device.",
        "",
    )
    yield "| case | kernel | lookup ms | update ms | of copies | goal |"
    yield "|---|---|--:|--:|---|---|"
    for name, own in section.items():
        yield from _kernel(own) if "figures" in own else [f"| not run | {name} | | | {own['problem']} | |"]


def _kernel(section: Mapping[str, Any]) -> Iterator[str]:
    figures = section["figures"]
    yield from (f"| not run | | | | {reason} | |" for reason in figures["cases"][0].get("left_out", ()))
    yield f"| copies: {figures['copy_gb_s']:.0f} GB/s | | | | | |"
    for number, case in enumerate(figures["cases"]):
        name = "{tables} x {rows} x {dim}, batch {batch}, {ids} ids".format_map(case)
        for own in case["kernels"]:
            goal = section["goals"][own["kernel"]] if number == 0 else None
            parts = "" if goal is None else f"{goal['lookup']:.0%} / {goal['update']:.0%}"
            met = "" if goal is None else ("met" if goal["met"] else "missed")
            times = f"{own['lookup_ms']:.3f} | {own['update_ms']:.3f}"
            yield f"| {name} | {own['kernel']} | {times} | {parts} | {met} |"


def _steps(section: Mapping[str, Any]) -> Iterator[str]:
    if section:
        yield from ("", "## Steps", "", "| step | least ms | |", "|---|--:|---|")
        for name, own in section.items():
            least = own["figures"]["min_ms"] if own["figures"] else ""
            yield f"| {name} | {least} | {own['problem']} |"


def _tests(section: Mapping[str, Any]) -> Iterator[str]:
    counts = Counter(one["outcome"] for one in section["tests"])
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    yield from ("", "## Tests marked `gpu`", "", f"{told or 'none was found'}.", "")
    yield from (f"- `{run['command']}`: {run['problem']}" for run in section["runs"] if run["problem"])
    yield from ("", "| test | outcome | s | |", "|---|---|--:|---|")
    for one in section["tests"]:
        figures = ", ".join(f"{name} {value}" for name, value in one["figures"].items())
        text = " ".join(filter(None, (one["reason"], figures))).replace("|", "/")
        yield f"| {one['name']} | {one['outcome']} | {one['seconds']} | {text} |"
