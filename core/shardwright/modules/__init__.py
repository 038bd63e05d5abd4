"""Embedding modules, not sharded: what users write, and what the sharded ones must equal.

The names live in `embedding_configs` (no torch) and `embedding_modules`; nothing is imported here.
"""
