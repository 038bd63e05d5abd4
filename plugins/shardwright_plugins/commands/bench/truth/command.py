"""The command `bench truth`: options, the table for people, and files."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.tables import page

if TYPE_CHECKING:
    from rich.table import Table

_OF_JUDGING = {"estimator", "again", "output", "report", "json"}
"""Options that ``--again`` goes with: the others say what is measured, and how."""


def truth(
    context: typer.Context,
    workloads: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[WORKLOAD]...", help="Workload files; drawn workloads without any."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a rank and step; the workload's own by default.")
    ] = None,
    plans: Annotated[int, typer.Option(min=2, help="Plans of each workload.")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run of a plan.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each plan; the quickest counts.")] = 2,
    finals: Annotated[
        int,
        typer.Option(min=0, help="Rounds in which the quickest plans and those of estimators run in turn."),
    ] = 6,
    drawn: Annotated[int, typer.Option(min=1, help="How many workloads are drawn.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Number of the first drawn workload.")] = 0,
    estimator: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:key=value,...]", help="A model of time to judge; several are judged."),
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure nothing: judge by what this file of an earlier run has."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write plans and figures as JSON.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="truth.html", help="Write a page of pictures: predicted against measured times."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure plans of many kinds, and tell how well estimators predict and order them.

    Real steps on this machine's CPU, a process a rank: the ids of each bag are drawn evenly.
    """
    from shardwright.cli.plans import check_writable, write_text
    from shardwright.errors import InvalidInputError
    from shardwright_plugins.commands.bench.truth import running
    from shardwright_plugins.commands.bench.truth.workloads import drawn_workload

    for path in (output, report):
        check_writable(path)
    names = tuple(estimator or _known_estimators())
    settings = running.TruthSettings(names, ranks, plans, steps, rounds, finals)
    results: list[dict[str, Any]] = []

    def note(result: dict[str, Any]) -> None:
        results.append(result)
        if output is not None:
            write_text(output, json_format.dumps(told(), indent=1) + "\n")
        if not json:
            page().print(judgements(result))

    def told() -> dict[str, Any]:
        return {**head, "workloads": results}

    if again is not None:
        if given := _given(context):
            raise InvalidInputError(
                f"--again judges what {again} has and measures nothing: leave it out, or {', '.join(given)}"
            )
        head = running.read(again)
        head["settings"]["estimators"] = list(names)
        for result in head["workloads"]:
            note(running.judge(result, names))
    else:
        head = running.document(settings)
        asked = [_read(path) for path in workloads or ()]
        asked = asked or [drawn_workload(seed + number) for number in range(drawn)]
        if batch is not None:
            asked = [{**own, "batch_size_per_rank": batch} for own in asked]
        running.run(asked, settings, note=note)
    if report is not None:
        from shardwright_plugins.reports.html.measured import measured_page

        write_text(report, measured_page(told()))
    if json:
        typer.echo(json_format.dumps(told()))
    else:
        typer.echo(
            "{processor}, {settings[ranks]} ranks, steps of each run of a plan: {settings[steps]}".format(
                **head
            )
        )


def _given(context: typer.Context) -> list[str]:
    """Workloads and options that say what is measured, and how, as far as they were given."""
    # Of workloads that are not there, Typer 0.26 says that the command line has them.
    known = {name for name, value in context.params.items() if value not in (None, [], ())}
    sources = {name: context.get_parameter_source(name) for name in known - _OF_JUDGING}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    return sorted("a workload" if name == "workloads" else f"--{name}" for name in given)


def _read(path: Path) -> dict[str, Any]:
    """A workload as JSON data; one that has no name is called after its file."""
    from shardwright.planning.documents import WORKLOAD
    from shardwright.planning.tables.workload import Workload

    Workload.read(path)  # what is wrong is told with the file's name
    return {"name": path.stem, **WORKLOAD.read(path)}


def _known_estimators() -> list[str]:
    """The performance estimators that can be made without arguments."""
    from shardwright.contracts.estimator import PERFORMANCE
    from shardwright.host import host

    registry = host().estimators
    return [name for name in registry if registry.create(name).measures == PERFORMANCE]


def judgements(result: Mapping[str, Any]) -> Table:
    """A row for each estimator of one workload."""
    from rich import box
    from rich.table import Table

    times = [entry["step_ms"] for entry in result["plans"]]
    noise = result["noise"]
    table = Table(
        title=f"{result['workload'].get('name', '')}: {len(times)} plans of {min(times):.1f} to {max(times):.1f} ms"
        + ("" if noise is None else f", noise {noise:.0%}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("estimator", overflow="fold")  # the one column that gives way where there is little room
    for name in (
        *(
            "Spearman",
            "measured /\npredicted",
            "machine\nnow /\nthen",
            "median\nerror",
            "worst",
            "after\nthe\nfactor",
        ),
        *("own\nplan\nms", "slower\nthan\nbest", "noise\nof\nthat"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, own in result["estimators"].items():
        table.add_row(name, *_cells(own))
    return table


def _cells(own: Mapping[str, Any]) -> Iterator[str]:
    yield "-" if own["spearman"] is None else f"{own['spearman']:.2f}"
    yield f"{own['ratio']:.2f}"
    yield "-" if own["slower_machine"] is None else f"{own['slower_machine']:.2f}"
    for name in ("median_error", "worst_error", "error_after_ratio"):
        yield f"{own[name]:.0%}"
    yield "-" if own["own_ms"] is None else f"{own['own_ms']:.1f}"
    for name in ("slower", "slower_noise"):
        yield "-" if own[name] is None else f"{own[name]:.0%}"
