"""`shardwright check`, `explain` and `diff`: questions about plan documents; none needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.plans import check_writable, read_plan, write_text
from shardwright.cli.tables import console
from shardwright.errors import InvalidInputError
from shardwright.host.extensions import load_at, words_at
from shardwright.host.plugin_host import host
from shardwright.planning.options.inputs import under_assumed_values
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.proofs import checked_by
from shardwright.planning.text import bytes_text, count_text, json_text, number_text, percent_at_most
from shardwright.planning.watch import gap_of
from shardwright_plugins.commands.tables import table_of
from shardwright_plugins.plan_differences.check import CheckedPlan, check_plan, restate
from shardwright_plugins.plan_differences.compare import PlanDifference, compare_plans
from shardwright_plugins.plan_differences.explain import ExplainedOption, explain_table, explanation_lines
from shardwright_plugins.plan_differences.table_moves import ReshardMoves

_Document = Annotated[Path, typer.Argument(metavar="plan.json", help="A plan document.")]


def check(
    document: _Document,
    rewrite: Annotated[
        bool,
        typer.Option("--rewrite", help="Write value, bound and gap into the document as they are found."),
    ] = False,
) -> None:
    """Check a plan: it covers its tables, fits, costs what it says, and its bound is proven again."""
    plan = read_plan(document)
    found = check_plan(plan)
    certificate = plan.document.get("objective", {}).get("certificate") or {}
    for problem in found.problems:
        if not (rewrite and problem in found.misstatements):
            typer.echo(f"problem: {problem}")
    if len(found.problems) > (len(found.misstatements) if rewrite else 0):
        raise typer.Exit(1)
    num_tables = sum(len(tables) for tables in plan.plan.values())
    typer.echo(f"{count_text(num_tables, 'table')}: each row and column is covered once, and everything fits")
    typer.echo(f"value: {found.value_ms:.6g} ms")
    typer.echo(
        f"bound: {found.lower_bound_ms:.6g} ms, proven again, {checked_by(certificate)}; gap {_gap(found)}"
        f"{under_assumed_values(plan.document.get('inputs', {}))}"
        if found.lower_bound_ms > 0
        else "bound: none is claimed"
    )
    if rewrite:
        _rewrite(document, plan, found)


def _rewrite(path: Path, plan: ShardingPlan, found: CheckedPlan) -> None:
    """Write a plan's document anew, where it says what is not so."""
    if not found.misstatements:
        typer.echo("nothing to rewrite: the document says so")
        return
    write_text(path, restate(plan, found).to_json())
    for misstatement in found.misstatements:
        typer.echo(f"rewritten: {misstatement}")


def _gap(found: CheckedPlan) -> str:
    assert found.value_ms is not None  # there are no problems
    return percent_at_most(gap_of(found.value_ms, found.lower_bound_ms))


def explain(
    document: _Document,
    table: Annotated[str | None, typer.Option(metavar="T", help="The table's name or path.")] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured times of steps, to be compared with the plan's."),
    ] = None,
    refit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --measured: write the machine, refitted to the times."),
    ] = None,
) -> None:
    """Explain a table's option: the runner-up, and what ruled the others out. Or compare the plan with real steps."""
    check_writable(refit)
    plan = read_plan(document)
    if measured is not None:
        _explain_measured(plan, measured, refit)
    elif refit is not None:
        raise InvalidInputError("--refit needs --measured FILE, the times that the machine is refitted to")
    elif table is None:
        raise InvalidInputError("explain needs --table T, a table of the plan, or --measured FILE")
    if table is not None:
        _explain_table(plan, table)


def _explain_measured(plan: ShardingPlan, measured: Path, refit: Path | None) -> None:
    """Print what extensions at the point ``explain`` tell of measured times."""
    offered = host().extensions
    for word in words_at("explain", offered):
        for line in load_at("explain", word, offered)(plan, measured, refit):
            typer.echo(line)


def _explain_table(plan: ShardingPlan, table: str) -> None:
    explanation = explain_table(plan, table)
    head, *refusals = explanation_lines(explanation)
    times = ("all ms", "slowest ms")
    rows = table_of("option", "shards", *times, "largest shard", "why", right=times)
    for option in (explanation.chosen, *explanation.others):
        rows.add_row(*_cells(option))
    typer.echo(head)
    typer.echo(refusals[0])
    console().print(rows)
    for line in refusals[1:]:
        typer.echo(line)


def _cells(option: ExplainedOption) -> tuple[str, ...]:
    memory = ", ".join(f"{bytes_text(size)} {tier}" for tier, size in option.largest_bytes.items() if size)
    return (
        option.name,
        str(option.num_shards),
        f"{option.total_ms:.4g}",
        f"{option.largest_ms:.4g}",
        memory,
        option.reason,
    )


def diff(
    first: Annotated[Path, typer.Argument(metavar="a.json", help="The plan before.")],
    second: Annotated[Path, typer.Argument(metavar="b.json", help="The plan after.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two plans: what a reshard sends between which ranks, how many bytes, and how long that takes."""
    found = compare_plans(read_plan(first), read_plan(second))
    if as_json:
        typer.echo(json_text(found.to_data()))
        return
    _show_changes(found)
    if found.moves.sent_bytes:
        _show_moves(found.moves)
    if None not in found.values_ms:
        typer.echo(f"value: {found.values_ms[0]:.6g} ms before, {found.values_ms[1]:.6g} ms after")
    for path, value, stated in zip((first, second), found.values_ms, found.stated_ms, strict=True):
        if stated is not None:
            typer.echo(
                f"{path} says value_ms = {stated:.6g}; its shards' costs add up to {value:.6g} ms. "
                f"`shardwright check --rewrite {path}` writes that."
            )


def _show_changes(found: PlanDifference) -> None:
    count = len(found.changes)
    rows = table_of("table", "before", "after", "moves", "of")
    for change in found.changes:
        before, after = (" / ".join(side) if side else "none" for side in (change.before, change.after))
        rows.add_row(
            change.path, before, after, bytes_text(change.moved_bytes), bytes_text(change.total_bytes)
        )
    if found.changes:
        console().print(rows)
    typer.echo(
        f"{count_text(count, 'table')} differ{'s' * (count == 1)}, {found.num_equal} do{'es' * (found.num_equal == 1)} "
        f"not; {bytes_text(found.moved_bytes)} of weights move"
    )


def _show_moves(moves: ReshardMoves) -> None:
    """Tell what a reshard sends, weights and optimizer states, over which links and how long."""
    what = "weights and optimizer states" if moves.counts_states else "weights; states are not known"
    same, near, far = (bytes_text(size) for size in moves.by_link.values())
    typer.echo(
        f"a reshard sends {bytes_text(moves.sent_bytes)} ({what}): {near} inside hosts, {far} between hosts; "
        f"{same} of these tables stay on their ranks"
    )
    ranks = moves.by_rank
    sender = max(ranks, key=lambda rank: ranks[rank][0])
    receiver = max(ranks, key=lambda rank: ranks[rank][1])
    typer.echo(
        f"most leaves rank {sender}, {bytes_text(ranks[sender][0])}; most comes to rank {receiver}, "
        f"{bytes_text(ranks[receiver][1])}"
    )
    typer.echo(f"by the topology's bandwidths that takes {number_text(moves.ms)} ms")
