"""Extensions of one point: their words, and what they load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from shardwright.arguments import problem
from shardwright.errors import PluginLoadError, UnknownPluginError, nearest

if TYPE_CHECKING:
    from shardwright.contracts.extension import Extension
    from shardwright.host.registry import Registry

__all__ = ["ask_at", "load_at", "words_at"]


def words_at(point: str, registry: Registry[Extension]) -> tuple[str, ...]:
    """The words of the extensions at a point, sorted: names without the point."""
    return tuple(name.partition(":")[2] for name in registry.names if name.startswith(f"{point}:"))


def load_at(
    point: str, word: str, registry: Registry[Extension], besides: Iterable[str] = ()
) -> Callable[..., Any]:
    """Import an extension.

    Args:
        point: the place at which it is called, such as ``report``.
        word: name of the extension there, or an alias, such as ``html``.
        registry: the extensions that are installed.
        besides: words that the point knows without extensions, for the error.

    Raises:
        UnknownPluginError: there is none; the text names those of the point, and plugins that are not loaded.
        PluginLoadError: it cannot be imported, or is nothing to be called.
    """
    name = f"{point}:{word}"
    try:
        entry = registry.entry(name)
    except UnknownPluginError as error:
        known = sorted([*words_at(point, registry), *besides])
        raise UnknownPluginError(
            f"no {point} {word!r}. Known: {', '.join(known) or 'none'}.{nearest(word, known)}{registry.not_loaded}"
        ) from error
    whose = f"{name!r} of plugin {entry.provenance}"
    try:
        target = registry.create(name).load()
    except ImportError as error:
        raise PluginLoadError(f"{whose} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(target):
        raise PluginLoadError(f"{whose} loads {target!r}, which cannot be called")
    return target


def ask_at(
    point: str, word: str, registry: Registry[Extension], gives: Any, *args: Any, **kwargs: Any
) -> Any:
    """Import an extension, call it, and check what it gives.

    Args:
        point: the place at which it is called, such as ``method``.
        word: name of the extension there, such as ``reshard``.
        registry: the extensions that are installed.
        gives: annotation of what the point takes.
        args: arguments of the call.
        kwargs: arguments of the call by name.

    Raises:
        UnknownPluginError: there is none.
        PluginLoadError: it cannot be imported, is nothing to be called, or gives something else.
    """
    answer = load_at(point, word, registry)(*args, **kwargs)
    if wrong := problem("what it gives", answer, gives):
        whose = registry.entry(f"{point}:{word}").provenance
        raise PluginLoadError(f"'{point}:{word}' of plugin {whose} broke its contract: {wrong}")
    return answer
