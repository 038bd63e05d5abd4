"""``fused_triton`` in processes of its own: interpreted, compiled for devices, and on one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pytest
from tests.plugins.compute_kernels.loops import kernel_of
from tests.programs import printed_by

import shardwright as sw

CHECKS = "tests/plugins/compute_kernels/triton_checks.py"


def run(*command: str, interpret: bool) -> str:
    """Standard output of a Python program, in which Triton is imported anew."""
    return printed_by(*command, env={**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"})


def check(*, interpret: bool, checks: str = CHECKS) -> None:
    """Run the checks; whatever Triton itself warns of is not theirs."""
    run(
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow or not slow",
        checks,
        interpret=interpret,
    )


def launches_for(
    capability: int, num_cases: int, module: str = "tests.plugins.compute_kernels.triton_compile"
) -> list[dict[str, Any]]:
    """What was compiled for a device of that compute capability."""
    pytest.importorskip("triton")
    lines = run("-m", module, str(capability), str(num_cases), interpret=False).splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_interpreted_kernels_keep_what_the_kit_and_all_checks_ask() -> None:
    pytest.importorskip("triton")
    check(interpret=True)


@pytest.mark.slow
def test_kernels_compile_to_machine_code_without_a_device() -> None:
    found = launches_for(90, 1)
    assert {line["kernel"] for line in found} == {
        "list_ids",
        "look_up",
        "sort_few",
        "update_chunks",
        "update_long_runs",
        "weight_gradients",
    }
    assert all(line["has_machine_code"] and line["rounds_to_nearest"] for line in found)
    # Rows of 64 and 128 columns are read and written in vectors of 16 bytes.
    assert all(
        "ld128" in line["accesses"] for line in found if line["kernel"] in ("look_up", "update_chunks")
    )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_all_cases_compile_to_machine_code(capability: int) -> None:
    found = launches_for(capability, 99)
    assert len(found) == 56
    assert all(line["has_machine_code"] and line["rounds_to_nearest"] for line in found)


def test_batches_whose_payload_begins_elsewhere_are_compiled_once() -> None:
    """Triton compiles anew for each mix of pointers that are multiples of 16, which costs a second in mid-training."""
    pytest.importorskip("triton")
    modules = {"list_ids": FUSED, "look_up": FUSED, "update_chunks": FUSED}
    assert loose_kernels(modules) == list(modules)


FUSED = "shardwright_plugins.compute_kernels.fused_triton._kernels"


def loose_kernels(modules: Mapping[str, str]) -> list[str]:
    """Kernels, by their modules, that are not compiled anew for other alignments of a batch's payload."""
    return run("-c", _LOOSE, json.dumps(modules), interpret=False).split()


_LOOSE = """
import importlib, json, sys
for name, module in json.loads(sys.argv[1]).items():
    kernel = getattr(importlib.import_module(module), name)
    own = {"ids", "id_weights", "lengths", "cells"} & set(kernel.arg_names)
    loose = {one.name for one in kernel.params if one.do_not_specialize_on_alignment}
    if own and own == loose:
        print(kernel.__name__)
"""


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_kernels_keep_what_the_kit_and_all_checks_ask() -> None:
    check(interpret=False)


def request_for(device: str, **changes: Any) -> sw.KernelRequest:
    values = {"data_type": sw.DataType.FP32, "embedding_dim": 16, "num_columns": 16, **changes}
    return sw.KernelRequest(device, optimizer=sw.OptimizerSpec("sgd"), **values)


def test_supports_names_the_interpreter_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernel = kernel_of("fused_triton")
    assert kernel.supports(request_for("cuda")) is True
    assert "TRITON_INTERPRET=1" in str(kernel.supports(request_for("cpu")))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel.supports(request_for("cpu")) is True
    assert "TRITON_INTERPRET is set" in str(kernel.supports(request_for("cuda")))


def planned(device: str, **rule: Any) -> str:
    planner = sw.EmbeddingShardingPlanner(
        topology=sw.Topology(world_size=2, compute_device=device),
        constraints={"t": sw.ParameterConstraints(**rule)},
        batch_size=64,
    )
    table = sw.TableSpec("t", 1000, 16, data_type="FP16", optimizer=sw.OptimizerSpec("sgd"))
    return planner.plan_tables([table]).plan[""]["t"].compute_kernel


def test_interpreted_kernel_is_planned_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert planned("cpu") != "fused_triton"
    assert planned("cpu", compute_kernels=["fused_triton"]) == "fused_triton"


def test_without_fbgemm_plans_for_cuda_take_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright_plugins.compute_kernels.fbgemm import fused

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert planned("cuda") == "fused"
    monkeypatch.setattr(fused, "_missing", lambda _: "FBGEMM is not installed")
    assert planned("cuda") == "fused_triton"
