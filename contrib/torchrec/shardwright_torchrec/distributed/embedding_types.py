"""The base of sharders."""

from __future__ import annotations

import shardwright as sw

BaseEmbeddingSharder = sw.ModuleSharder
