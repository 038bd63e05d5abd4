"""Weight decay of rows that got a gradient, in the two forms of FBGEMM's ``WeightDecayMode``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

L2, DECOUPLED = "l2", "decoupled"
_MODES = {L2: L2, DECOUPLED: DECOUPLED, "decouple": DECOUPLED}
"""Names of the modes; the last is FBGEMM's."""


def decay_refusal(parameters: Mapping[str, Any]) -> str:
    """Explain why a mode of weight decay is none; empty if it is one."""
    mode = parameters["weight_decay_mode"]
    return "" if mode in _MODES else f"weight_decay_mode must be {L2!r} or {DECOUPLED!r}, got {mode!r}"


def decays(parameters: Mapping[str, Any], learning_rate: float) -> tuple[float, float]:
    """Find the numbers of weight decay.

    Returns:
        The factor of weights that is added to gradients (L2 penalty), and the factor of weights that is left of them
        (decoupled: Loshchilov & Hutter 2019), one of which does nothing.
    """
    decay, mode = float(parameters["weight_decay"]), _MODES[parameters["weight_decay_mode"]]
    return (decay, 1.0) if mode == L2 else (0.0, 1.0 - learning_rate * decay)


def has_l2(parameters: Mapping[str, Any]) -> bool:
    """True if weights are added to gradients."""
    return bool(parameters["weight_decay"]) and _MODES[parameters["weight_decay_mode"]] == L2
