"""``hash_table_triton`` in processes of its own: interpreted, compiled for devices, and on one."""

from __future__ import annotations

import json
import os

import pytest
import shardwright_hash_embedding
from shardwright_hash_embedding import HashSettings
from tests.contrib import distributions
from tests.plugins.compute_kernels.test_triton import check, loose_kernels, run

import shardwright as sw
from shardwright.host import PluginHost, use_host

CHECKS = "tests/contrib/hash_embedding/triton_checks.py"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution, in processes that tests start too."""
    path = [str(distributions.ROOT / "hash_embedding"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


@pytest.mark.slow
def test_interpreted_index_keeps_what_the_kit_and_all_checks_ask() -> None:
    pytest.importorskip("triton")
    check(interpret=True, checks=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_search_compiles_to_machine_code_that_takes_slots_by_compare_and_swap(capability: int) -> None:
    pytest.importorskip("triton")
    lines = run("-m", "tests.contrib.hash_embedding.triton_compile", str(capability), interpret=False)
    assert [json.loads(line) for line in lines.splitlines()] == [
        {"kernel": "put_rows", "has_machine_code": True, "swaps": 1},
        {"kernel": "find_rows", "has_machine_code": True, "swaps": 0},
    ]


def test_batches_whose_payload_begins_elsewhere_are_compiled_once() -> None:
    pytest.importorskip("triton")
    assert loose_kernels({"find_rows": "shardwright_hash_embedding.triton_search"}) == ["find_rows"]


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_index_keeps_what_all_checks_ask() -> None:
    check(interpret=False, checks=CHECKS)


def test_tables_of_keys_are_planned_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    table = sw.TableSpec("t", 1000, 16, optimizer=sw.OptimizerSpec("sgd"))
    with use_host(PluginHost(plugins={"hash_embedding": shardwright_hash_embedding})):
        planner = sw.EmbeddingShardingPlanner(
            topology=sw.Topology(world_size=2, compute_device="cuda"),
            constraints={"t": HashSettings().constraints()},
            batch_size=64,
        )
        assert planner.plan_tables([table]).plan[""]["t"].compute_kernel == "hash_table_triton"
