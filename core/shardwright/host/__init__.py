"""The plugin host: what is installed, what it offers, and what must be the same on all ranks of a job.

:func:`host` gives that of this process, a :class:`PluginHost` with a :class:`Registry` for each kind of plugin;
:func:`use_host` another, for tests. A :class:`Fingerprint` says what ranks compare when a process group starts.
"""

from __future__ import annotations

import importlib
from typing import Any

# Imported on first use: planning reads what plugins offer, and what is offered are contracts of planning.
_MODULE_OF_NAME = {
    "Fingerprint": "fingerprint",
    "PluginHost": "plugin_host",
    "Registry": "registry",
    "compare_fingerprints": "fingerprint",
    "host": "plugin_host",
    "use_host": "plugin_host",
}

__all__ = sorted(_MODULE_OF_NAME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
