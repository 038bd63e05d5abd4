"""Plugins that users name, with arguments: ``"name"`` or ``"name:key=value,key=value"``."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from shardwright.errors import InvalidInputError, PluginLoadError, ShardwrightError, nearest
from shardwright.host.offers import Provenance, make_entry

if TYPE_CHECKING:
    from shardwright.host.registry import Registry

_Plugin = TypeVar("_Plugin")

# Commas that an argument follows: a value may be a list.
_BETWEEN = re.compile(r",(?=\s*\w+\s*=)")


def make_plugin(registry: Registry[_Plugin], asked: str | _Plugin, argument: str) -> _Plugin:
    """Return the plugin asked for: an object as it is; by name, a new one, made with the arguments after the name.

    Args:
        registry: the kind.
        asked: an object, ``"name"`` or ``"name:key=value,..."``, values JSON or plain text.
        argument: the caller's name for this, for errors.

    Raises:
        UnknownPluginError: nothing has this name.
        InvalidInputError: it is of another kind, or a class; or it does not take these arguments.
    """
    if isinstance(asked, str):
        name, arguments = split_name(registry, asked)
        entry = registry.entry(name)
        make: Callable[..., Any] = entry.item if isinstance(entry.item, type) else lambda: entry.item
        made: _Plugin = made_with(
            make, f"{registry.kind.title} {entry.name!r} of plugin {entry.provenance}", arguments
        )
        return made
    contract = registry.kind.contract
    if isinstance(asked, contract):
        try:
            make_entry(registry.kind, asked, Provenance(argument, "this process"))
        except PluginLoadError as error:
            raise InvalidInputError(f"{argument}: {error}") from error
        return asked
    title = registry.kind.title
    title = f"an {title}" if title[0] in "aeiou" else f"a {title}"
    if isinstance(asked, type) and issubclass(asked, contract):
        raise InvalidInputError(
            f"{argument} is the class {asked.__name__}; give the name of {title} or an object: {asked.__name__}()"
        )
    raise InvalidInputError(
        f"{argument} must be {title} or the name of one, got {asked!r}. Known: {', '.join(registry.names) or 'none'}."
    )


def split_name(registry: Registry[Any], asked: str) -> tuple[str, dict[str, Any]]:
    """The name in what was asked for, and the arguments.

    Raises:
        InvalidInputError: the text after the colon is no list of arguments.
    """
    name, colon, rest = asked.partition(":")
    if not colon or asked in registry:
        return asked, {}
    arguments: dict[str, Any] = {}
    for text in _BETWEEN.split(rest):
        key, equals, value = text.partition("=")
        if not (equals and key.strip().isidentifier()) or key.strip() in arguments:
            raise InvalidInputError(
                f"{asked!r}: arguments are given as {name}:key=value,key=value, each once; got {text!r}"
            )
        arguments[key.strip()] = _value(value.strip())
    return name, arguments


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def made_with(make: Callable[..., Any], what: str, arguments: Mapping[str, Any]) -> Any:
    """Make a plugin with the arguments after its name.

    Args:
        make: the class or function.
        what: its kind and name, for errors.
        arguments: the arguments.

    Raises:
        InvalidInputError: it does not take them.
    """
    taken = [key for key in inspect.signature(make).parameters if key not in ("args", "kwargs")]
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "nothing"
    try:
        inspect.signature(make).bind(**arguments)
        return make(**arguments)
    except ShardwrightError:
        raise
    except (TypeError, ValueError) as error:
        near = next((hint for key in arguments if key not in taken and (hint := nearest(key, taken))), "")
        reason = str(error).rstrip(".")
        raise InvalidInputError(
            f"{what} cannot be made with {shown}: {reason}. It takes: {', '.join(taken) or 'none'}.{near}"
        ) from error
