"""The base of sharders."""

from __future__ import annotations

import shardwright as sw

__all__ = ["BaseEmbeddingSharder"]

BaseEmbeddingSharder = sw.ModuleSharder
