"""Fixtures of core's tests of optimizers."""

from __future__ import annotations

from tests.core.optim.conftest import apply

__all__ = ["apply"]
