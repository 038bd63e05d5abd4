"""The contract of an extension: what a plugin adds at a point of the program, beside planning and training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from attrs import field, frozen
from attrs.validators import in_


class Extension(ABC):
    """Something that a plugin adds at a point, such as a command of the `shardwright` program.

    ``name`` is the point, a colon and a word of the plugin's: ``command:demo``. ``load`` is called when the extension
    is used, and then only: imports belong there. What it must return depends on the point; `shardwright docs extension`
    lists them. A point is any word: plugins may have their own.
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    help: ClassVar[str] = ""
    """One line for lists, such as `shardwright --help`: what it does. Commands need it."""

    @abstractmethod
    def load(self) -> Callable[..., Any]:
        """Import what is called at the point."""


@frozen
class Finding:
    """One thing that a check of the installation looked at: what an extension at the point ``check`` yields.

    Attributes:
        part: area of the installation that it belongs to.
        name: name of the package, plugin or setting.
        found: version, number or value.
        state: `ok`; `absent` or `off`, which is no fault; or `broken`.
        reason: why it is not `ok`, or what is to be known of it.
        command: command that would mend it, or bring it; empty for none.
    """

    part: str
    name: str
    found: str = ""
    state: str = field(default="ok", validator=in_(("ok", "absent", "off", "broken")))
    reason: str = ""
    command: str = ""
