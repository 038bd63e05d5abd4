"""Conformance tests of commands."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.cli.offered import group_of
from shardwright.contracts.command import Command
from shardwright_testing.plugins_under_test import installed

_LONGEST_HELP = 100  # characters: the help of a command fits on its line of the list
_TIMEOUT_S = 200  # seconds that a command may take on a loaded machine

# Imports what offers the command, and prints the modules that are there afterwards and heavy.
_LISTING = """
import importlib, sys
importlib.import_module({module!r})
print(*sorted({heavy!r} & set(sys.modules)))
"""


class CommandTests:
    """The tests of a command: give the fixture ``command``, an instance."""

    def test_help_is_one_line(self, command: Command) -> None:
        """`shardwright --help` shows one line beside the name."""
        text = getattr(command, "help", "")
        assert isinstance(text, str), f"{command.name}: help must be a text, got {text!r}"
        assert text.strip(), f"{command.name}: has no help, a line for `shardwright --help`"
        assert text.splitlines() == [text[:_LONGEST_HELP]], (
            f"{command.name}: help must be one line of {_LONGEST_HELP} characters at most, got {text!r}"
        )

    def test_name_is_none_of_core(self, command: Command) -> None:
        """A command of core has the name before any plugin's."""
        taken = {*group_of(app).commands} & {command.name, *command.aliases}
        assert not taken, f"{command.name}: shardwright has a command {', '.join(sorted(taken))} already"

    def test_command_is_listed(self, command: Command) -> None:
        """The program lists its name and its help."""
        with installed(command):
            shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400"}).output
        for word in (command.name, command.help):
            assert word in shown, f"{command.name}: {word!r} is not listed:\n{shown}"

    def test_command_loads_and_tells_its_options(self, command: Command) -> None:
        """`shardwright NAME --help` works."""
        with installed(command):
            done = CliRunner().invoke(app, [command.name, "--help"])
        assert done.exit_code == 0, (
            f"{command.name} --help ends with {done.exit_code}: {done.output}{done.exception!r}"
        )

    def test_module_imports_nothing_heavy(self, command: Command) -> None:
        """Listing commands imports the module of each: torch belongs into ``load``."""
        module = type(command).__module__
        source = _LISTING.format(module=module, heavy={"torch", "pandas", "sklearn"})
        command_line = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{source}"]
        done = subprocess.run(command_line, capture_output=True, text=True, timeout=_TIMEOUT_S)
        assert done.returncode == 0, f"{command.name}: {module} cannot be imported by itself: {done.stderr}"
        found = done.stdout.strip()
        assert not found, f"{command.name}: importing {module} imports {found}; import it in load()"
