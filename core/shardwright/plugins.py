"""Deprecated: see :mod:`shardwright.host`."""

from shardwright._moved import moved

__getattr__ = moved(
    "shardwright.plugins",
    {
        "KINDS": "shardwright.hookspecs",
        **dict.fromkeys(("PluginHost", "host", "use_host"), "shardwright.host"),
    },
)
