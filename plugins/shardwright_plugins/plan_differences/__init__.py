"""Plans beside their documents, beside others, and beside other options of a table: what is so, what moves, and why."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import names_of


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the comparisons."""
    return [
        names_of(
            "names:comparisons",
            (
                "shardwright_plugins.plan_differences.compare",
                "shardwright_plugins.plan_differences.explain",
                "shardwright_plugins.plan_differences.check",
            ),
            "Plans checked, differences between plans, and between a table's options.",
        )
    ]
