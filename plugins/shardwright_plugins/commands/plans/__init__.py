"""`shardwright explain` and `shardwright diff`: questions about plan documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension


class Explain(Extension):
    """Says why a table has its option, or compares a plan with measured steps."""

    name = "command:explain"
    help = (
        "Explain a table's option: runner-up, and what ruled others out. Or compare the plan with real steps."
    )

    def load(self) -> Callable[..., Any]:
        """The command `explain`."""
        from shardwright_plugins.commands.plans.command import explain

        return explain


class Diff(Extension):
    """Compares two plans."""

    name = "command:diff"
    help = "Compare two plans: what a reshard sends between which ranks, and how long that takes."

    def load(self) -> Callable[..., Any]:
        """The command `diff`."""
        from shardwright_plugins.commands.plans.command import diff

        return diff
