from __future__ import annotations

import warnings
from typing import Any

import pytest

from shardwright.optim import apply_optimizer_in_backward


def _torchs_apply() -> Any:
    with warnings.catch_warnings():  # importing torch.distributed.optim uses what torch itself deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    return _apply_optimizer_in_backward


@pytest.fixture(params=["shardwright", "torch"])
def apply(request: pytest.FixtureRequest) -> Any:
    """Our and torch's way to attach an optimizer to the backward pass."""
    return apply_optimizer_in_backward if request.param == "shardwright" else _torchs_apply()
