"""Quantised tables for serving: rows of few bits, and the collections that look them up."""

from __future__ import annotations

from shardwright.modules.quantized.collections import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantizedCollection,
)
from shardwright.modules.quantized.known_ids import KnownIds
from shardwright.modules.quantized.quantizing import quantize_embeddings
from shardwright.modules.quantized.rows import QuantizedRows, quantize_rows

__all__ = [
    "KnownIds",
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingCollection",
    "QuantizedCollection",
    "QuantizedRows",
    "quantize_embeddings",
    "quantize_rows",
]
