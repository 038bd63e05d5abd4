"""Environment variables of the runtime, so that they reach every rank that a launcher starts.

Those of the plugin host stand in :mod:`shardwright.host.settings`.
"""

from __future__ import annotations

CHECKS_VARIABLE = "SHARDWRIGHT_INPUT_CHECKS"
