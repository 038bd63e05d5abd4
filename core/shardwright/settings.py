"""Environment variables of the runtime, so that they reach every rank that a launcher starts.

Those of the plugin host stand in :mod:`shardwright.host.settings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardwright.errors import InvalidInputError

__all__ = ["CHECKS_VARIABLE", "SHARED_MEMORY_VARIABLE", "may_share_memory"]

CHECKS_VARIABLE = "SHARDWRIGHT_INPUT_CHECKS"
SHARED_MEMORY_VARIABLE = "SHARDWRIGHT_SHARED_MEMORY"


def may_share_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """True if ranks of one host may exchange through memory they share: yes, unless the variable says ``off``.

    Raises:
        InvalidInputError: it says neither ``on`` nor ``off``.
    """
    told = environment.get(SHARED_MEMORY_VARIABLE) or "on"
    if told not in ("on", "off"):
        raise InvalidInputError(f"{SHARED_MEMORY_VARIABLE} is {told!r}; it must be 'on' or 'off'")
    return told == "on"
