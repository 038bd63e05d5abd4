"""The plugin host of this process, for values that users write: names, devices and codecs.

These have no argument for registries; all else is handed its own. The package says where the host comes from
(``shardwright/__init__.py``), so that contracts and tables do not import the plugin host, which imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_source: Callable[[], Any]


def provide(source: Callable[[], Any]) -> None:
    """Say what gives the plugin host of this process."""
    global _source
    _source = source


def process_host() -> Any:
    """The plugin host of this process: what :func:`shardwright.host.host` gives."""
    return _source()
