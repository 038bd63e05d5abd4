"""Which kernel plans prefer on this processor follows from what was measured on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardwright as sw
from shardwright_plugins.commands.bench.command import bench
from shardwright_plugins.compute_kernels import _cpu_speeds

pytest.importorskip("numba")
pytest.importorskip("fbgemm_gpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _cpu_speeds._known.cache_clear()
    yield tmp_path
    _cpu_speeds._known.cache_clear()


def planned_kernel() -> str:
    topology = sw.Topology(world_size=1, compute_device="cpu")
    table = sw.EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"])
    module = sw.EmbeddingBagCollection([table], device="meta")
    sharder = sw.EmbeddingBagCollectionSharder({"optimizer": "row_wise_adagrad"})
    plan = sw.EmbeddingShardingPlanner(topology=topology, batch_size=8).plan(module, [sharder])
    return plan.plan[""]["t"].compute_kernel


def test_without_figures_numba_is_preferred() -> None:
    assert planned_kernel() == "fused_numba"


@pytest.mark.parametrize(
    ("fused", "preferred"), [(8.0, "fused"), (9.5, "fused_numba"), (20.0, "fused_numba")]
)
def test_kernel_that_was_clearly_faster_is_preferred(fused: float, preferred: str) -> None:
    _cpu_speeds.keep({"fused": fused, "fused_numba": 10.0})
    assert planned_kernel() == preferred


def test_figures_of_another_processor_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(_cpu_speeds, "processor", lambda: "another")
        _cpu_speeds.keep({"fused": 1.0, "fused_numba": 10.0})
    assert planned_kernel() == "fused_numba"


def test_damaged_file_is_as_none(cache: Path) -> None:
    _cpu_speeds.keep({"fused": 1.0, "fused_numba": 10.0})
    _cpu_speeds.speeds_file().write_text("{")
    _cpu_speeds._known.cache_clear()
    assert planned_kernel() == "fused_numba"


def test_bench_kernels_keeps_figures_that_planning_reads() -> None:
    done = CliRunner().invoke(bench, ["kernels", "--steps", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert {"fused", "fused_numba"} <= set(_cpu_speeds._known())
