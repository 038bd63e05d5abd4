"""Names of what the built-in plugins offer. Tests of all of a kind are of these, whatever else is installed."""

from __future__ import annotations

from shardwright.host import host


def built_in(label: str) -> list[str]:
    """Sorted names of a kind, by the label of its registry, such as ``"sharding_types"``."""
    entries = getattr(host(), label).entries
    return sorted(name for name, entry in entries.items() if entry.provenance.distribution == "shardwright")
