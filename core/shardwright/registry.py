"""Deprecated: see :mod:`shardwright.host`."""

from shardwright._moved import moved

__getattr__ = moved("shardwright.registry", {"Registry": "shardwright.host"})
