"""`shardwright check`, and files that commands about plans read and write; none needs torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwright.planning.plan.plan import ShardingPlan
    from shardwright.planning.report.check import CheckedPlan

__all__ = ["check", "check_writable", "read_plan", "write_text"]

_Document = Annotated[Path, typer.Argument(metavar="plan.json", help="A plan document.")]


def check(
    document: _Document,
    rewrite: Annotated[
        bool,
        typer.Option("--rewrite", help="Write value, bound and gap into the document as they are found."),
    ] = False,
) -> None:
    """Check a plan: it covers its tables, fits, costs what it says, and its bound is proven again."""
    from shardwright.planning.options.inputs import under_assumed_values
    from shardwright.planning.proofs import checked_by
    from shardwright.planning.report.check import check_plan

    plan = read_plan(document)
    found = check_plan(plan)
    certificate = plan.document.get("objective", {}).get("certificate") or {}
    for problem in found.problems:
        if not (rewrite and problem in found.misstatements):
            typer.echo(f"problem: {problem}")
    if len(found.problems) > (len(found.misstatements) if rewrite else 0):
        raise typer.Exit(1)
    num_tables = sum(len(tables) for tables in plan.plan.values())
    typer.echo(f"{num_tables} tables: each row and column is covered once, and everything fits")
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
    from shardwright.planning.report.check import restate

    if not found.misstatements:
        typer.echo("nothing to rewrite: the document says so")
        return
    write_text(path, restate(plan, found).to_json())
    for misstatement in found.misstatements:
        typer.echo(f"rewritten: {misstatement}")


def _gap(found: CheckedPlan) -> str:
    from shardwright.planning.watch import gap_of

    assert found.value_ms is not None  # there are no problems
    return f"{gap_of(found.value_ms, found.lower_bound_ms):.3%}"


def read_plan(path: Path) -> ShardingPlan:
    """Read a plan document.

    Raises:
        PlanError: it is malformed; the text names the file.
    """
    from shardwright.errors import PlanError
    from shardwright.planning.documents import PLAN
    from shardwright.planning.plan.plan import ShardingPlan

    text = PLAN.text(path)
    try:
        return ShardingPlan.from_json(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def check_writable(path: Path | None) -> None:
    """Check that a file can be written before work begins whose result it is to hold.

    Raises:
        InvalidInputError: it is a folder, or its folder does not exist or may not be written to.
    """
    from shardwright.errors import InvalidInputError

    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {str(folder)!r}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "that is not permitted"
    else:
        return
    raise InvalidInputError(f"cannot write {str(path)!r}: {reason}. Name a file that can be written.")


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        InvalidInputError: it cannot be written.
    """
    from shardwright.errors import InvalidInputError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot write {str(path)!r}: {error.strerror}") from error
