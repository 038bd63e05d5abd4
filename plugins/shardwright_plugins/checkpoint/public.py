"""Public names of checkpoints."""

from __future__ import annotations

from shardwright_plugins.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from shardwright_plugins.checkpoint.reading import StoredCheckpoint, StoredTensor, open_checkpoint
from shardwright_plugins.checkpoint.saving import SavedCheckpoint, save_checkpoint

__all__ = [
    "LoadedCheckpoint",
    "SavedCheckpoint",
    "StoredCheckpoint",
    "StoredTensor",
    "load_checkpoint",
    "open_checkpoint",
    "save_checkpoint",
]
