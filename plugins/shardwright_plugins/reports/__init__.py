"""Formats of reports beside text and JSON; progress of planning, and why it failed; measured times."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the built-in formats of reports, the line of progress, explanations of failures, and the comparison."""
    return [
        imported(
            "explain:times",
            "shardwright_plugins.following.comparison:comparison_lines",
            "Measured times beside those that a plan predicts.",
        ),
        imported(
            "report:html", "shardwright_plugins.reports.html.page:page", "One page of HTML with pictures."
        ),
        imported(
            "method:no_plan",
            "shardwright_plugins.reports.no_plan:no_plan",
            "Why there is no plan, with the numbers, and what would help.",
        ),
        imported(
            "method:progress",
            "shardwright_plugins.reports.progress:shown",
            "The progress of planning on a line of standard error.",
        ),
    ]
