"""The command `doctor`: runs the checks that plugins offer, and prints what they find."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from shardwright.cli.tables import page
from shardwright.contracts.extension import Finding
from shardwright.host.extensions import load_at, words_at
from shardwright.host.plugin_host import host
from shardwright_plugins.commands.tables import table_of

if TYPE_CHECKING:
    from shardwright.contracts.extension import Extension
    from shardwright.host.registry import Registry

_CHECK, _FIRST = "check", "python"
_STYLES = {"absent": "dim", "off": "dim", "broken": "red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Tell what is installed and whether it works together; exit code 1 if something does not."""
    findings = list(examine(host().extensions))
    if json:
        typer.echo(json_format.dumps([attrs.asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
        _print_verdict(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def examine(extensions: Registry[Extension]) -> Iterator[Finding]:
    """Run every check; one that fails is a finding itself, and the rest goes on.

    Args:
        extensions: the extensions that are installed; those at the point ``check`` are run, Python's and torch's first.
    """
    for word in sorted(words_at(_CHECK, extensions), key=lambda word: (word != _FIRST, word)):
        try:
            for finding in load_at(_CHECK, word, extensions)():
                if not isinstance(finding, Finding):
                    raise TypeError(f"the check yields {finding!r}, which is no Finding")
                yield finding
        except Exception as error:
            yield Finding(word, "", state="broken", reason=f"{type(error).__name__}: {error}")


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.text import Text

    table = table_of("part", "name", "found", "state", "")
    for finding in findings:
        cells = (finding.part, finding.name, finding.found, finding.state, finding.reason)
        table.add_row(*map(Text, cells), style=_STYLES.get(finding.state))
    page().print(table)


def _print_verdict(findings: Sequence[Finding]) -> None:
    """Print the verdict and the commands that would mend it; these are printed as they are, to be copied."""
    broken = [finding for finding in findings if finding.state == "broken"]
    typer.echo(f"\n{len(broken)} broken." if broken else "\nWhat is installed works together.")
    for finding in findings:
        if finding.command:
            purpose = "to mend" if finding.state == "broken" else "to have"
            typer.echo(f"{purpose} {finding.name}: {finding.command}")
