"""Models that are sharded over real processes are exported as one package."""

from __future__ import annotations

from pathlib import Path

import pytest
import shardwright_serving as serving
import torch
from tests.contrib.serving.distributed import export_workers as workers

import shardwright as sw
from shardwright_testing.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("cut", ["row_wise", "column_wise", "hashed"])
def test_two_ranks_export_one_package(cut: str, pool: RankPool, tmp_path: Path) -> None:
    wanted, other = pool.run(workers.export, 2, cut, str(tmp_path))
    found = serving.load_package(tmp_path / cut).predict(sw.KeyedJaggedTensor.from_lists(workers.BATCH))
    assert torch.equal(wanted, other)
    torch.testing.assert_close(found["output"], wanted, rtol=1e-4, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == [cut]
