"""Extensions that are names in modules, which are imported when the extensions are used."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, cast

from shardwright.contracts import Extension


def imported(name: str, target: str, help: str) -> type[Extension]:
    """Make an extension that loads a function or class.

    Args:
        name: name of the extension: its point, a colon and a word.
        target: module, a colon and the name in it.
        help: one line for lists.
    """
    return _made(name, target, help, lambda self: resolve_name(target))


def names_of(name: str, modules: tuple[str, ...], help: str) -> type[Extension]:
    """Make an extension at the point ``names``, which brings what has a public name.

    Args:
        name: name of the extension.
        modules: modules that have the names; of two with one name the first counts.
        help: one line for lists.
    """
    return _made(
        name,
        modules[0],
        help,
        lambda self: ChainMap(*(vars(import_module(own)) for own in modules)).__getitem__,
    )


def _made(name: str, module: str, help: str, load: Callable[[Any], Any]) -> type[Extension]:
    """A class that stands in the package of the plugin, with its help as docstring."""
    package = ".".join(module.split(".")[:2])
    fields = {"name": name, "help": help, "load": load, "__doc__": help, "__module__": package}
    make: Any = type(Extension)
    return cast("type[Extension]", make(name, (Extension,), fields))
