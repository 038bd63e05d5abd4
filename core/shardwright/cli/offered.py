"""Commands that plugins offer, beside those of core: listed by name and help, imported when they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperGroup

from shardwright.cli.tables import flowing
from shardwright.errors import ShardwrightError, UnknownPluginError, nearest
from shardwright.host.extensions import load_at, words_at

if TYPE_CHECKING:
    from shardwright.contracts.extension import Extension
    from shardwright.host.registry import Registry

COMMAND = "command"
"""The point of commands; each loads a function that Typer runs, or a Typer app."""

_PANEL = "Commands of plugins"


class Program(TyperGroup):
    """The commands of core and of plugins. Where both have a name, core's is meant.

    Plugins are asked only where it matters: for the list of commands, and for a name that core does not have.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of core's commands, then those that plugins offer."""
        return [*self.commands, *(name for name in self._offered() if name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of core, or a stand-in with the help of the one that a plugin offers; None for neither."""
        own = self.commands.get(cmd_name)
        if own is not None or cmd_name not in self._offered():
            return _with_flowing_help(own)
        return _stand_in(cmd_name, _registry().create(f"{COMMAND}:{cmd_name}").help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command to run: that of core, or the one that a plugin offers, imported now."""
        name = args[0]
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        try:
            target = load_at(COMMAND, name, _registry())
        except UnknownPluginError:
            near = nearest(name, self.list_commands(ctx))
            ctx.fail(f"No such command {name!r}.{near}{_registry().not_loaded}")
        name = _registry().canonical(f"{COMMAND}:{name}").partition(":")[2]
        return name, _with_flowing_help(_as_command(name, target)), args[1:]

    def _offered(self) -> tuple[str, ...]:
        """Names that plugins offer. The list of commands is shown also where plugins cannot be loaded."""
        try:
            return words_at(COMMAND, _registry())
        except ShardwrightError as error:
            typer.echo(f"error: {error}", err=True)
            return ()


def group_of(app: typer.Typer) -> TyperGroup:
    """The commands of an app, by name."""
    return cast(TyperGroup, typer.main.get_command(app))


def _registry() -> Registry[Extension]:
    from shardwright.host.plugin_host import host

    return host().extensions


def _with_flowing_help(command: Any) -> Any:
    """A command, and those below it, whose help fills the terminal; without that it breaks where docstrings do."""
    if command is not None:
        command.help = command.help and flowing(command.help)
        for own in getattr(command, "commands", {}).values():
            _with_flowing_help(own)
    return command


def _stand_in(name: str, help_text: str) -> Any:
    """A command with the name and help of an offered one, which does nothing."""
    app = typer.Typer(add_completion=False)
    app.command(name, help=help_text, rich_help_panel=_PANEL)(lambda: None)
    return typer.main.get_command(app)


def _as_command(name: str, target: Any) -> Any:
    """The command of a function or of a Typer app."""
    app = typer.Typer(add_completion=False)
    if not isinstance(target, typer.Typer):
        app.command(name)(target)
        return typer.main.get_command(app)
    app.add_typer(target, name=name)
    return group_of(app).commands[name]
