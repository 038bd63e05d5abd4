"""The built-in estimators."""

from __future__ import annotations

from shardwright.contracts import Estimator
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_estimators() -> list[type[Estimator]]:
    """Offer the built-in estimators."""
    return []
