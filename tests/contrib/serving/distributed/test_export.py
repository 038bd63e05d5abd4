"""Models that are sharded over real processes are exported as one package."""

from __future__ import annotations

from pathlib import Path

import pytest
import shardwright_serving as serving
import torch
from tests.distributed.checkpoints.checkpoint_workers import model_of

import shardwright as sw
from shardwright_testing.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

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


@pytest.mark.parametrize("cut", ["row_wise", "column_wise", "hashed"])
def test_two_ranks_export_one_package(cut: str, pool: RankPool, tmp_path: Path) -> None:
    wanted, other = pool.run(export, 2, cut, str(tmp_path))
    found = serving.load_package(tmp_path / cut).predict(sw.KeyedJaggedTensor.from_lists(BATCH))
    assert torch.equal(wanted, other)
    torch.testing.assert_close(found["output"], wanted, rtol=1e-4, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == [cut]
