"""The built-in formats of reports, beside text and JSON, which are core's; and measured times beside a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl


class Html(Extension):
    """One page with pictures, that opens without a network."""

    name = "report:html"
    help = "One page of HTML with pictures."

    def load(self) -> Callable[..., Any]:
        """The function that makes the page of a report's data."""
        from shardwright_plugins.reports.html.page import page

        return page


class Times(Extension):
    """Compares measured times of steps with a plan."""

    name = "explain:times"
    help = "Measured times beside those that a plan predicts."

    def load(self) -> Callable[..., Any]:
        """The function that tells of a plan and a document of measured times."""
        from shardwright_plugins.following.comparison import comparison_lines

        return comparison_lines


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the built-in formats of reports, and the comparison."""
    return [Html, Times]
