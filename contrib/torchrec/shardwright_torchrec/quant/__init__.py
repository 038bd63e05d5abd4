"""Quantised tables for serving, under TorchRec's names; what they are is in `shardwright` itself."""

from __future__ import annotations

from shardwright import QuantizedRows, quantize_rows
from shardwright_torchrec.quant.collections import (
    QuantConfig,
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
)
from shardwright_torchrec.quant.inference import (
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from shardwright_torchrec.quant.sharding import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    shard_modules,
)
from shardwright_torchrec.quant.tracing import Tracer, symbolic_trace

__all__ = [
    "QuantConfig",
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingBagCollectionSharder",
    "QuantEmbeddingCollection",
    "QuantEmbeddingCollectionSharder",
    "QuantizedRows",
    "Tracer",
    "quantize_embeddings",
    "quantize_inference_model",
    "quantize_rows",
    "shard_modules",
    "shard_quant_model",
    "symbolic_trace",
]
