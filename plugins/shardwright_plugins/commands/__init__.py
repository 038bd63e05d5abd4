"""The built-in commands beside those of core, and the checks of `shardwright doctor`."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported

_HERE = "shardwright_plugins.commands"
_CHECKS = f"{_HERE}.doctor.checks"


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the built-in commands and checks."""
    return [
        imported("check:devices", f"{_CHECKS}:devices", "Processor, accelerators, memory and bandwidths."),
        imported(
            "check:environment",
            f"{_CHECKS}:environment",
            "Environment variables that shardwright and its libraries read.",
        ),
        imported("check:plugins", f"{_CHECKS}:plugins", "Plugins that are installed, off, or failed."),
        imported("check:python", f"{_CHECKS}:python", "Python, shardwright and torch."),
        imported(
            "command:bench",
            f"{_HERE}.bench.command:bench",
            "Measure plans beside what estimators predict.",
        ),
        imported(
            "command:calibrate",
            f"{_HERE}.calibrate.command:calibrate",
            "Measure this machine, so that plans are made for it.",
        ),
        imported(
            "command:checkpoint",
            f"{_HERE}.checkpoint.command:checkpoint",
            "Show, verify and convert checkpoints.",
        ),
        imported(
            "command:check",
            f"{_HERE}.plans.command:check",
            "Check a plan: it covers its tables, fits, costs what it says, and its bound is proven again.",
        ),
        imported(
            "command:demo",
            f"{_HERE}.demo.command:demo",
            "Train a DLRM with sharded embedding tables on local processes, and evaluate it.",
        ),
        imported(
            "command:diff",
            f"{_HERE}.plans.command:diff",
            "Compare two plans: what a reshard sends between which ranks, and how long that takes.",
        ),
        imported(
            "command:docs",
            f"{_HERE}.pages.command:docs",
            "List the pages of documentation that are installed, or print one.",
        ),
        imported(
            "command:doctor",
            f"{_HERE}.doctor.command:doctor",
            "Tell what is installed, whether it works together, and what would mend it.",
        ),
        imported(
            "command:explain",
            f"{_HERE}.plans.command:explain",
            "Explain a table's option: runner-up, and what ruled others out. Or compare the plan with real steps.",
        ),
        imported("command:plugin", f"{_HERE}.new_plugin.command:plugin", "Write plugins."),
        imported(
            "command:profile",
            f"{_HERE}.profile.command:profile",
            "Measure ids per bag and caches' hit rates on Parquet files, as constraints for plan.",
        ),
    ]
