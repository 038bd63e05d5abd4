"""Loading one plugin: import it, check it, ask its hooks, and tell what became of it.

Each plugin has a pluggy manager of its own, that is thrown away afterwards. So a plugin that fails half-way
leaves nothing behind, a misspelt hook and a hook that raises are known to be that plugin's, and no plugin can
change the order in which another is asked, or wrap its answer.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint
from typing import Any, Literal

import attrs
import pluggy

from shardwright import hookspecs
from shardwright.errors import PluginLoadError, nearest
from shardwright.host.offers import Entry, Kind, Provenance, check_version, make_entry

Offers = dict[str, tuple[Any, ...]]
"""Items that the hooks of one plugin returned: hook -> items."""


@attrs.frozen
class Source:
    """An installed plugin that is not imported yet."""

    provenance: Provenance
    load: Callable[[], object]

    @classmethod
    def from_entry_point(cls, entry_point: EntryPoint) -> Source:
        """The plugin that an entry point names. Its module is found, not imported."""
        distribution, version = _name_and_version(entry_point.dist)
        return cls(
            Provenance(
                plugin=entry_point.name,
                distribution=distribution,
                version=version,
                module=entry_point.module,
                file=_find_file(entry_point.module),
            ),
            entry_point.load,
        )

    @classmethod
    def in_process(cls, name: str, plugin: object) -> Source:
        """A plugin object of this process, without a distribution."""
        module = getattr(plugin, "__name__", type(plugin).__module__)
        return cls(Provenance(plugin=name, distribution="this process", module=module), lambda: plugin)


@attrs.frozen
class PluginRecord:
    """State of one installed plugin.

    Attributes:
        provenance: Which plugin, of which distribution.
        state: Whether it is in use.
        reason: Why it is off, or why it failed; one line.
        entries: hook -> what it offers, if it was loaded.
        claimed: hook -> the names it would have offered, as far as they are known, if it failed.
        error: What it failed with.
    """

    provenance: Provenance
    state: Literal["loaded", "off", "failed"]
    reason: str = ""
    entries: Mapping[str, tuple[Entry[Any], ...]] = attrs.field(factory=dict)
    claimed: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    error: BaseException | None = attrs.field(default=None, eq=False)


def load_plugin(source: Source, kinds: Sequence[Kind[Any]]) -> PluginRecord:
    """Import a plugin, check it and collect what it offers. It raises nothing: a failure is in the record."""
    offers: Offers = {}
    try:
        plugin = source.load()
        check_version(plugin, "its module")
        manager = _register(plugin, source.provenance.plugin)
        for kind in kinds:
            offers[kind.hook] = _ask(manager, kind)
        entries = {kind.hook: _make_entries(kind, offers[kind.hook], source.provenance) for kind in kinds}
    # A module that calls sys.exit() when imported must not end the program that looked for plugins.
    except (Exception, SystemExit) as error:
        return PluginRecord(
            source.provenance, "failed", _explain(error), claimed=_claimed(offers), error=error
        )
    return PluginRecord(source.provenance, "loaded", entries=entries)


def _register(plugin: object, name: str) -> pluggy.PluginManager:
    """Let pluggy compare the plugin's hooks with the specifications.

    Raises:
        PluginLoadError: If a hook is unknown, takes arguments, is not marked, or if there is none at all.
    """
    manager = pluggy.PluginManager("shardwright")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name)
    except pluggy.PluginValidationError as error:
        # pluggy's text has several lines: what is wrong stands in the last two.
        raise PluginLoadError(" ".join(str(error).split())) from error
    callers = manager.get_hookcallers(plugin) or []
    known = [name for name in dir(hookspecs) if name.startswith("shardwright_")]
    for caller in callers:
        if not caller.has_spec():
            raise PluginLoadError(
                f"it implements an unknown hook {caller.name!r}. Known: {', '.join(known)}."
                + nearest(caller.name, known)
            )
    unmarked = [name for name in known if hasattr(plugin, name) and name not in {c.name for c in callers}]
    if unmarked:
        raise PluginLoadError(f"its {', '.join(unmarked)} is not marked with @shardwright.hookimpl.")
    if not callers:
        raise PluginLoadError(f"it implements no hook. Known: {', '.join(known)}.")
    return manager


def _ask(manager: pluggy.PluginManager, kind: Kind[Any]) -> tuple[Any, ...]:
    """Call one hook of the one plugin that the manager has; nothing if the plugin does not implement it."""
    hook: pluggy.HookCaller = getattr(manager.hook, kind.hook)
    if not hook.get_hookimpls():
        return ()
    try:
        answers = hook()
    except Exception as error:
        raise PluginLoadError(f"its hook {kind.hook} raised {_explain(error)}") from error
    # pluggy leaves an answer of None out.
    answer = answers[0] if answers else None
    if not isinstance(answer, list | tuple):
        raise PluginLoadError(
            f"its hook {kind.hook} returned {answer!r}; it must return a list or tuple of {kind.title}s."
        )
    return tuple(answer)


def _make_entries(kind: Kind[Any], items: Sequence[object], provenance: Provenance) -> tuple[Entry[Any], ...]:
    """Check each item; refuse two different ones of one plugin under one name."""
    entries = tuple(make_entry(kind, item, provenance) for item in items)
    owners: dict[str, object] = {}
    for entry in entries:
        for word in entry.words:
            if owners.setdefault(word, entry.item) is not entry.item:
                raise PluginLoadError(f"it offers two {kind.title}s under the name {word!r}.")
    return entries


def _claimed(offers: Offers) -> dict[str, tuple[str, ...]]:
    """The names that a plugin would have offered, from whatever its hooks had returned when it failed."""
    return {
        hook: tuple(name for item in items if isinstance(name := getattr(item, "name", None), str))
        for hook, items in offers.items()
    }


def _explain(error: BaseException) -> str:
    """An error in one line. Our own texts speak for themselves; others are given with their type."""
    text = " ".join(str(error).split())
    if isinstance(error, PluginLoadError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@functools.lru_cache(maxsize=64)
def _name_and_version(distribution: Distribution | None) -> tuple[str, str]:
    """Read a distribution's name and version, once: its metadata is parsed anew each time, which takes milliseconds."""
    if distribution is None:
        return "(no distribution)", ""
    metadata = distribution.metadata
    return metadata["Name"], metadata["Version"]


def _find_file(module: str) -> str:
    """The file of a module, found without importing it or its packages; empty if it is not found."""
    if module in sys.modules:
        return inspect.getattr_static(sys.modules[module], "__file__", None) or ""
    path: Sequence[str] | None = None
    origin = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return ""
        path, origin = spec.submodule_search_locations, spec.origin
    return origin or ""
