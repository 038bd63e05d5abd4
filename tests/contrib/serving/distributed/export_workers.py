"""What the ranks of the tests of exports do; importable by their processes."""

from __future__ import annotations

from pathlib import Path

import shardwright_serving as serving
import torch
from tests.distributed.checkpoints.checkpoint_workers import model_of

import shardwright as sw

BATCH = {"user": [[3, 2499], []], "item": [[1], [2, 2]], "liked": [[], [1299, 0]]}


def export(cut: str, folder: str) -> torch.Tensor:
    """Export a sharded model; give what it predicts, quantized."""
    model, _ = model_of(cut, seed=1)
    features = sw.KeyedJaggedTensor.from_lists(BATCH)
    path = Path(folder) / cut
    serving.export_for_inference(model, features, path, forms=["torchscript"], check=False)
    quantized = serving.quantize_embeddings(model.unshard())
    with torch.no_grad():
        return quantized(features)
