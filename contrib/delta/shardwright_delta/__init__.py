"""Increments of a sharded model: the rows of each table that changed since a mark, as Arrow record batches."""

from __future__ import annotations

from shardwright_delta.blocks import HeldBlock, held_blocks
from shardwright_delta.changes import Changes, every_row
from shardwright_delta.files import read_increment, write_increment
from shardwright_delta.replay import replay

__all__ = ["Changes", "HeldBlock", "every_row", "held_blocks", "read_increment", "replay", "write_increment"]
