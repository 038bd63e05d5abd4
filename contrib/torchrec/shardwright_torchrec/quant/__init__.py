"""Quantized tables for serving, under TorchRec's names; what they are is in `shardwright_serving`."""

from __future__ import annotations

from shardwright_serving import QuantizedRows, quantize_rows
from shardwright_serving.scripting import Tracer, symbolic_trace

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
