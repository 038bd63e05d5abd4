"""Ranks on this machine, started by a script or a notebook."""

from shardwright_plugins.launch.local import launch

__all__ = ["launch"]
