"""What only a fresh process shows: nothing was imported yet that registers sharders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
import shardwright as sw

table = sw.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])
model = sw.DistributedModelParallel(sw.EmbeddingBagCollection([table], device="meta"))
features = sw.KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
print(list(model(features).values().shape))
dist.destroy_process_group()
"""


@pytest.mark.slow  # in each run, the README's notebook is such a process
@pytest.mark.distributed
def test_model_parallel_finds_default_sharders_in_a_fresh_process(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "store")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[2, 8]"
