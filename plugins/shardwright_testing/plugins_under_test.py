"""Plugins that are not installed, known to planner and engine for as long as a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.host import PluginHost, host, use_host


@contextmanager
def installed(plugin: Any) -> Iterator[PluginHost]:
    """Let ``host()`` know an object under its name, as if its distribution were installed.

    An entry under that name, or under one of the aliases, gives way: also the object's own class, which may have
    other arguments.

    Args:
        plugin: an instance of one of the contracts.

    Raises:
        InvalidInputError: it is an instance of none.
        PluginLoadError: it has no usable name, or was written for another version of the contracts.
    """
    with use_host(host().replacing(plugin)) as own:
        yield own
