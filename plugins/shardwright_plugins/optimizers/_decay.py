"""Weight decay of rows that got a gradient, in the two forms of FBGEMM's ``WeightDecayMode``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

L2, DECOUPLED, NONE = "l2", "decoupled", "none"
_MODES = {L2: L2, DECOUPLED: DECOUPLED, NONE: NONE, "decouple": DECOUPLED}
"""Names of the modes; the last two are FBGEMM's."""


def decay_refusal(parameters: Mapping[str, Any]) -> str:
    """Explain why a mode of weight decay is none; empty if it is one."""
    mode = parameters["weight_decay_mode"]
    return (
        "" if mode in _MODES else f"weight_decay_mode must be {L2!r}, {DECOUPLED!r} or {NONE!r}, got {mode!r}"
    )


def decays(parameters: Mapping[str, Any], learning_rate: float) -> tuple[float, float]:
    """Find the numbers of weight decay.

    Returns:
        The factor of weights that is added to gradients (L2 penalty), and the factor of weights that is left of them
        (decoupled: Loshchilov & Hutter 2019), of which one at least does nothing.
    """
    decay, mode = float(parameters["weight_decay"]), _MODES[parameters["weight_decay_mode"]]
    return (decay if mode == L2 else 0.0, 1.0 - learning_rate * decay if mode == DECOUPLED else 1.0)


def has_l2(parameters: Mapping[str, Any]) -> bool:
    """True if weights are added to gradients."""
    return bool(parameters["weight_decay"]) and _MODES[parameters["weight_decay_mode"]] == L2
