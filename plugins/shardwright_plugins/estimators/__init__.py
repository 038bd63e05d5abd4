"""The built-in estimators."""

from __future__ import annotations

from shardwright.contracts import Estimator
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_estimators() -> list[type[Estimator]]:
    """Offer the built-in estimators."""
    from shardwright_plugins.estimators.engine import engines
    from shardwright_plugins.estimators.roofline import Roofline
    from shardwright_plugins.estimators.torchrec_performance import TorchRecPerformance
    from shardwright_plugins.estimators.torchrec_storage import TorchRecStorage
    from shardwright_plugins.estimators.weights_and_buffers import WeightsAndBuffers

    return [*engines(), Roofline, TorchRecPerformance, TorchRecStorage, WeightsAndBuffers]
