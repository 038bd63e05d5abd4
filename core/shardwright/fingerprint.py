"""Deprecated: see :mod:`shardwright.host`."""

from shardwright._moved import moved

__getattr__ = moved(
    "shardwright.fingerprint",
    dict.fromkeys(("Fingerprint", "compare_fingerprints"), "shardwright.host"),
)
