"""The plugin: TorchRec's own estimators, under a name of theirs."""

from __future__ import annotations

import shardwright
from shardwright_torchrec.live import TorchRecLive, TorchRecLiveStorage

__all__: list[str] = []

api = 1


@shardwright.hookimpl
def shardwright_estimators() -> list[type[shardwright.Estimator]]:
    """The two estimators."""
    return [TorchRecLive, TorchRecLiveStorage]
