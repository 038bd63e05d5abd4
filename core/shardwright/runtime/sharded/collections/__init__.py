"""Sharded collections of tables, and the sharders that make them from collections of a model."""
