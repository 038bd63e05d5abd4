"""Plugins that are not installed, known to planner and engine for as long as a test runs."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.hookspecs import KINDS, hookimpl
from shardwright.host.offers import Kind, Provenance, make_entry
from shardwright.host.plugin_host import PluginHost, host, use_host
from shardwright.host.settings import PLUGINS_VARIABLE, PREFER_VARIABLE

_NAME = "under_test"


@contextmanager
def installed(plugin: Any) -> Iterator[PluginHost]:
    """Let ``host()`` know an object under its name, as if its distribution were installed.

    Something else that is installed under that name, or under one of the aliases, gives way.

    Args:
        plugin: an instance of one of the contracts.

    Raises:
        PluginLoadError: it has no usable name, or was written for another version of the contracts.
    """
    kind = _kind_of(plugin)
    make_entry(kind, plugin, Provenance("the kit", "this process"))
    entries = host().registry_of(kind.contract).entries
    served = entries[plugin.name].item if plugin.name in entries else None
    if served is plugin or served is type(plugin):
        yield host()
        return
    with use_host(
        PluginHost(plugins={_NAME: _module(kind, plugin)}, environment=_environment(plugin))
    ) as own:
        yield own


def _kind_of(plugin: Any) -> Kind[Any]:
    for kind in KINDS:
        if isinstance(plugin, kind.contract):
            return kind
    raise TypeError(f"{plugin!r} is an instance of none of {', '.join(k.contract.__name__ for k in KINDS)}")


def _module(kind: Kind[Any], plugin: Any) -> types.ModuleType:
    def offer() -> list[Any]:
        return [plugin]

    module = types.ModuleType(_NAME)
    setattr(module, kind.hook, hookimpl(offer))
    return module


def _environment(plugin: Any) -> dict[str, str]:
    """Return the process's environment, with the plugin among those that are loaded, and preferred."""
    environment = dict(os.environ)
    words = {f"{word}=this process" for word in (plugin.name, *plugin.aliases)}
    given = environment.get(PREFER_VARIABLE, "").split(",")
    kept = [
        pair for pair in given if pair and pair.split("=")[0].strip() not in (plugin.name, *plugin.aliases)
    ]
    environment[PREFER_VARIABLE] = ",".join([*kept, *sorted(words)])
    selected = environment.get(PLUGINS_VARIABLE)
    if selected is not None and not selected.lstrip().startswith("-"):
        environment[PLUGINS_VARIABLE] = ",".join(filter(None, [selected, _NAME]))
    return environment
