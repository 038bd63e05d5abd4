"""The contract of a command: a tool of a plugin, run as `shardwright NAME`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from shardwright.contracts.names import OpenNames

if TYPE_CHECKING:
    from typer import Typer


class Command(ABC, metaclass=OpenNames):
    """A command of the `shardwright` program.

    `shardwright --help` reads ``name`` and ``help`` of every command that is installed. ``load`` is called when the
    command runs, and then only: imports belong there. A command of core has the name before any plugin's.

    A :class:`~shardwright.errors.ShardwrightError` that a command raises is printed without a traceback, with exit
    code 1.
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    help: ClassVar[str]
    """One line of `shardwright --help`: what the command does."""

    @abstractmethod
    def load(self) -> Callable[..., Any] | Typer:
        """Import the command.

        Returns:
            A function whose parameters are annotated for Typer, or a ``typer.Typer`` with commands of its own.
        """
