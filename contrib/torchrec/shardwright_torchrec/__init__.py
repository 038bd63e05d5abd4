"""TorchRec's scripts on shardwright, TorchRec's plans in and out, and TorchRec's own estimators as a plugin."""

from __future__ import annotations

from shardwright_torchrec.names import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
