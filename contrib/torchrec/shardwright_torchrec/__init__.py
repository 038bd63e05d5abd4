"""TorchRec's scripts on shardwright, TorchRec's plans in and out, and TorchRec's own estimators as a plugin."""

from __future__ import annotations

from shardwright_torchrec.names import install, is_installed, uninstall
from shardwright_torchrec.plans import read_plan, to_torchrec, write_plan

__all__ = ["install", "is_installed", "read_plan", "to_torchrec", "uninstall", "write_plan"]
