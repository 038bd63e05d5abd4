"""Commands that plugins offer, beside those of core: listed by name and help, imported when they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperGroup

from shardwright.cli.tables import flowing
from shardwright.errors import PluginLoadError, ShardwrightError, UnknownPluginError, nearest

if TYPE_CHECKING:
    from shardwright.contracts import Command
    from shardwright.host.registry import Registry

__all__ = ["Program", "group_of"]

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
        return _stand_in(_registry().create(cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command to run: that of core, or the one that a plugin offers, imported now."""
        name = args[0]
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        registry = _registry()
        try:
            entry = registry.entry(name)
        except UnknownPluginError:
            near = nearest(name, self.list_commands(ctx))
            ctx.fail(f"No such command {name!r}.{near}{registry.not_loaded}")
        command = _loaded(registry.create(name), str(entry.provenance))
        return entry.name, _with_flowing_help(command), args[1:]

    def _offered(self) -> tuple[str, ...]:
        """Names that plugins offer. The list of commands is shown also where plugins cannot be loaded."""
        try:
            return _registry().names
        except ShardwrightError as error:
            typer.echo(f"error: {error}", err=True)
            return ()


def group_of(app: typer.Typer) -> TyperGroup:
    """The commands of an app, by name."""
    return cast(TyperGroup, typer.main.get_command(app))


def _registry() -> Registry[Command]:
    from shardwright.host.plugin_host import host

    return host().commands


def _with_flowing_help(command: Any) -> Any:
    """A command, and those below it, whose help fills the terminal; without that it breaks where docstrings do."""
    if command is not None:
        command.help = command.help and flowing(command.help)
        for own in getattr(command, "commands", {}).values():
            _with_flowing_help(own)
    return command


def _stand_in(command: Command) -> Any:
    """A command with the name and help of an offered one, which does nothing."""
    app = typer.Typer(add_completion=False)
    app.command(command.name, help=getattr(command, "help", ""), rich_help_panel=_PANEL)(lambda: None)
    return typer.main.get_command(app)


def _loaded(command: Command, provenance: str) -> Any:
    """The offered command itself.

    Raises:
        PluginLoadError: It cannot be imported, or is neither a function nor a Typer app.
    """
    try:
        target = command.load()
    except ImportError as error:
        raise PluginLoadError(
            f"the command {command.name!r} of plugin {provenance} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(target):
        raise PluginLoadError(
            f"the command {command.name!r} of plugin {provenance} loads {target!r}; load() must return a function or "
            "a typer.Typer."
        )
    app = typer.Typer(add_completion=False)
    if not isinstance(target, typer.Typer):
        app.command(command.name)(target)
        return typer.main.get_command(app)
    app.add_typer(target, name=command.name)
    return group_of(app).commands[command.name]
