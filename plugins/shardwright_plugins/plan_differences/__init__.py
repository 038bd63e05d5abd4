"""Differences between plans, and between the options of a table: what moves, what costs, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl


class Comparisons(Extension):
    """Compares plans, and a table's option with the others: `shardwright.compare_plans` and `explain_table`."""

    name = "names:comparisons"
    help = "Differences between plans, and between a table's options."

    def load(self) -> Callable[[str], Any]:
        """The function that gives what has a public name."""
        from shardwright_plugins.plan_differences import compare, explain

        return (vars(compare) | vars(explain)).__getitem__


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the comparisons."""
    return [Comparisons]
