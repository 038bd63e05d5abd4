"""``quant_triton`` in processes of its own: interpreted, compiled for devices, and on one."""

from __future__ import annotations

import pytest
from tests.plugins.compute_kernels.test_triton import check, launches_for, loose_kernels

import shardwright as sw

CHECKS = "tests/contrib/serving/kernels/quant_triton_checks.py"
COMPILE = "tests.contrib.serving.kernels.triton_compile"


@pytest.mark.slow
def test_interpreted_lookups_keep_what_the_kit_and_all_checks_ask() -> None:
    pytest.importorskip("triton")
    check(interpret=True, checks=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_lookups_of_all_cases_compile_to_machine_code(capability: int) -> None:
    found = launches_for(capability, 99, COMPILE)
    assert [line["kernel"] for line in found] == ["look_up_rows"] * 5
    assert all(line["has_machine_code"] and line["rounds_to_nearest"] for line in found)
    # Four INT8 columns are read at once, and four results are written.
    assert "ld8" not in found[0]["accesses"]
    assert "st128" in found[0]["accesses"]


def test_batches_whose_payload_begins_elsewhere_are_compiled_once() -> None:
    pytest.importorskip("triton")
    assert loose_kernels({"look_up_rows": "shardwright_serving.kernels._triton_kernels"}) == ["look_up_rows"]


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_lookups_keep_what_the_kit_and_all_checks_ask() -> None:
    check(interpret=False, checks=CHECKS)


@pytest.mark.parametrize(("precision", "kernel"), [("INT8", "quant_fbgemm"), ("FP8", "quant_triton")])
def test_served_tables_on_cuda_take_triton_where_fbgemm_has_not_the_precision(
    monkeypatch: pytest.MonkeyPatch, precision: str, kernel: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    topology = sw.Topology(world_size=2, compute_device="cuda")
    planner = sw.EmbeddingShardingPlanner(topology=topology, objective="serving")
    table = sw.TableSpec("t", 1000, 64, data_type=precision, optimizer=None, is_frozen=True)
    assert planner.plan_tables([table]).plan[""]["t"].compute_kernel == kernel
