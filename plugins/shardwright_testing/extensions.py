"""Conformance tests of extensions."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.cli.offered import COMMAND, group_of
from shardwright.contracts.extension import Extension, Finding
from shardwright.host.extensions import load_at
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.report.report import Report
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.watch import Watch
from shardwright_testing.plugins_under_test import installed

_LONGEST_HELP = 100  # characters: the help of a command fits on its line of the list
_TITLE = "A plan of two tables"
_AN_AGE_MS = 1e12
_TIMEOUT_S = 200  # seconds that a module may take to be imported on a loaded machine

# Imports what offers the extension, and prints the modules that are there afterwards and heavy.
_LISTING = """
import importlib, sys
importlib.import_module({module!r})
print(*sorted({heavy!r} & set(sys.modules)))
"""


class ExtensionTests:
    """The tests of an extension: give the fixture ``extension``, an instance."""

    def test_name_is_a_point_and_a_word(self, extension: Extension) -> None:
        """``command:demo``."""
        is_named = all(extension.name.partition(":"))
        assert is_named, f"{extension.name!r}: a name is a point, a colon and a word"

    def test_extension_loads_something_that_can_be_called(self, extension: Extension) -> None:
        """``load`` works where the extension is installed."""
        point, _, word = extension.name.partition(":")
        with installed(extension) as host:
            load_at(point, word, host.extensions)

    def test_extension_does_what_its_point_asks(self, extension: Extension) -> None:
        """Points of core are known here; what other points ask, their plugins test."""
        check = _POINTS.get(extension.name.partition(":")[0])
        if check is not None:
            check(extension)

    def test_module_imports_nothing_heavy(self, extension: Extension) -> None:
        """Listing extensions imports the module of each: torch belongs into ``load``."""
        module = type(extension).__module__
        source = _LISTING.format(module=module, heavy={"torch", "pandas", "sklearn"})
        command_line = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{source}"]
        done = subprocess.run(command_line, capture_output=True, text=True, timeout=_TIMEOUT_S)
        assert done.returncode == 0, f"{extension.name}: {module} cannot be imported by itself: {done.stderr}"
        found = done.stdout.strip()
        assert not found, f"{extension.name}: importing {module} imports {found}; import it in load()"


def _check_command(command: Extension) -> None:
    """Check that the program lists the command with its help, and that `shardwright NAME --help` works."""
    name, text = command.name.partition(":")[2], command.help
    assert text.strip(), f"{command.name}: has no help, a line for `shardwright --help`"
    assert text.splitlines() == [text[:_LONGEST_HELP]], (
        f"{command.name}: help must be one line of {_LONGEST_HELP} characters at most, got {text!r}"
    )
    assert name not in group_of(app).commands, f"{command.name}: shardwright has a command {name} already"
    with installed(command):
        shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400"}).output
        done = CliRunner().invoke(app, [name, "--help"])
    for word in (name, text):
        assert word in shown, f"{command.name}: {word!r} is not listed:\n{shown}"
    assert done.exit_code == 0, f"{name} --help ends with {done.exit_code}: {done.output}{done.exception!r}"


def _planned(**arguments: Any) -> tuple[ShardingPlan, Report]:
    """A plan of two tables, and its report."""
    planner = TablePlanner(Topology(2, "cpu"), **arguments)
    plan = planner.plan_tables([TableSpec("user", 100, 8, ["f"]), TableSpec("item", 1000, 16, ["g"])])
    assert planner.report is not None
    return plan, planner.report


def _check_report(format: Extension) -> None:
    """Check that a plan's report is rendered, as text with its title."""
    with installed(format):
        text = _planned()[1].to_format(format.name.partition(":")[2], _TITLE)
    assert isinstance(text, str), f"{format.name}: must return a text, got {text!r}"
    for word in (_TITLE, "user", "item"):
        assert word in text, f"{format.name}: {word!r} is not in the report of a plan that has it"


def _check_refinement(refinement: Extension) -> None:
    """Check that planning with it gives a plan; where it needs arguments, that they have names."""
    name = refinement.name.partition(":")[2]
    parameters = inspect.signature(refinement.load()).parameters.values()
    needed = [own for own in parameters if own.default is own.empty and own.kind is not own.VAR_KEYWORD]
    assert all(own.kind in (own.POSITIONAL_OR_KEYWORD, own.KEYWORD_ONLY) for own in needed), (
        f"{refinement.name}: arguments after a name are given by their names, and it takes {needed}"
    )
    if needed:
        return
    with installed(refinement):
        plans = [_planned(refinements=[name])[0].to_json() for _ in range(2)]
    first, second = (json.loads(plan)["modules"] for plan in plans)
    assert first == second, f"{refinement.name}: gives another plan of the same tables the second time"


def _check_check(check: Extension) -> None:
    """Check that it yields findings."""
    for finding in check.load()():
        assert isinstance(finding, Finding), f"{check.name}: yields {finding!r}, which is no Finding"


def _check_proof(proof: Extension) -> None:
    """Check that it does not believe without a proof that no plan of two tables takes less than an age."""
    space = _planned()[1].space
    with suppress(KeyError, TypeError, ValueError, AttributeError):  # are errors of certificates
        told = proof.load()(space, _AN_AGE_MS, {}, Watch())
        assert isinstance(told, str), f"{proof.name}: must return a text, got {told!r}"
        assert told, f"{proof.name}: believes without data that no plan takes less than {_AN_AGE_MS:.0e} ms"


def _check_sharder(extension: Extension) -> None:
    """Check that it makes a sharder which is found beside those of core, by the class that it serves."""
    from shardwright.runtime.sharded.collections.sharders import ModuleSharder, default_sharders

    made = extension.load()()
    assert isinstance(made, ModuleSharder), f"{extension.name}: makes {made!r}, which is no ModuleSharder"
    with installed(extension):
        served = [sharder.module_type for sharder in default_sharders()]
    assert made.module_type in served, f"{extension.name}: no default sharder serves {made.module_type}"


_POINTS: Mapping[str, Callable[[Extension], None]] = {
    COMMAND: _check_command,
    "check": _check_check,
    "proof": _check_proof,
    "refinement": _check_refinement,
    "report": _check_report,
    "sharder": _check_sharder,
}
