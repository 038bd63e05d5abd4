"""Extensions that a plugin of somebody else brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.core.conftest import make_plugin

from shardwright import Extension
from shardwright.host import PluginHost


def bringing(name: str, loaded: Callable[..., Any]) -> Any:
    """A plugin with one extension, whose ``load`` gives a function."""
    extension = type("Made", (Extension,), {"name": name, "load": lambda self: loaded})
    return make_plugin({"shardwright_extensions": lambda: [extension]})


def host_with(name: str, loaded: Callable[..., Any], off: str) -> PluginHost:
    """A host in which an extension takes the place of a built-in plugin."""
    return PluginHost(
        plugins={"other": bringing(name, loaded)}, environment={"SHARDWRIGHT_PLUGINS": f"-{off}"}
    )


def host_without(plugin: str) -> PluginHost:
    return PluginHost(environment={"SHARDWRIGHT_PLUGINS": f"-{plugin}"})
