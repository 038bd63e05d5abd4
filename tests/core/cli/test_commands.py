"""Commands that plugins offer: listed without being imported, imported when they run."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import typer
from tests.core.conftest import make_plugin
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright.errors import DuplicateNameError, PluginLoadError
from shardwright.host import PluginHost, use_host


def command(name: str, load: Any = None, **attributes: Any) -> type[sw.Extension]:
    """A command of this name."""

    def refuse(self: sw.Extension) -> Any:
        raise AssertionError(f"{name} is imported")

    members = {"name": f"command:{name}", "help": f"Do {name}.", "load": load or refuse, **attributes}
    return type("Made", (sw.Extension,), members)


def offering(*items: type[sw.Extension]) -> ModuleType:
    return make_plugin({"shardwright_extensions": lambda: list(items)})


def run(*words: str, **plugins: object) -> Any:
    with use_host(PluginHost(entry_points=(), plugins=plugins, environment={})):
        return CliRunner().invoke(app, words, env={"COLUMNS": "300"})


def say(text: str, times: int = 1) -> None:
    """Say a text, so many times."""
    typer.echo(" ".join([text] * times))


def test_command_is_listed_after_those_of_core_and_not_imported() -> None:
    shown = run("--help", made=offering(command("weigh"), command("count"))).output
    assert "Do weigh." in shown
    assert shown.index(" plan ") < shown.index(" count ") < shown.index(" weigh ")


def test_command_function_runs_with_its_options() -> None:
    made = offering(command("say", lambda self: say, aliases=("command:tell",)))
    assert run("say", "ha", "--times", "3", made=made).output == "ha ha ha\n"
    assert run("tell", "ho", made=made).output == "ho\n"
    assert "Say a text, so many times." in run("say", "--help", made=made).output


def test_command_of_core_has_the_name() -> None:
    shown = run("plugins", "--help", made=offering(command("plugins"))).output
    assert "List the installed plugins" in shown


def test_command_of_core_asks_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PluginHost, "_discover", lambda self: pytest.fail("plugins are asked"))
    assert run("plugins", "--help").exit_code == 0


def test_command_unknown_tells_the_nearest_and_what_is_not_loaded() -> None:
    broken = make_plugin({"shardwright_extensions": lambda: [3]})
    done = run("weihg", made=offering(command("weigh")), broken=broken)
    assert done.exit_code == 2
    assert "No such command 'weihg'. Did you mean 'weigh'? Not loaded: 'broken'" in done.output


def test_command_of_two_plugins_is_a_conflict_when_asked_for() -> None:
    done = run("weigh", one=offering(command("weigh")), two=offering(command("weigh")))
    assert isinstance(done.exception, DuplicateNameError)


def test_command_that_is_no_function_is_refused() -> None:
    error = run("weigh", made=offering(command("weigh", lambda self: "scales"))).exception
    assert isinstance(error, PluginLoadError)
    assert "'command:weigh' of plugin 'made' from this process loads 'scales'" in str(error)


def test_list_of_commands_is_shown_where_plugins_cannot_be_chosen(run_python: Any) -> None:
    done = run_python("-m", "shardwright", "--help", SHARDWRIGHT_PLUGINS="acme_god")
    assert done.returncode == 0
    assert " plan " in done.stdout
    assert done.stderr.startswith("error: SHARDWRIGHT_PLUGINS names the plugin 'acme_god'")
