"""The environment variable of exchanges through memory that ranks of one host share."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardwright.errors import InvalidInputError

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
