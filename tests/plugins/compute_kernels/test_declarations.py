"""What kernels declare: what they refuse and why, how much memory they take, which is preferred."""

from __future__ import annotations

import importlib.util
from typing import Any

import attrs
import pytest
from tests.plugins.compute_kernels.loops import kernel_names, kernel_of, skip_unless_here

from shardwright import ComputeKernel, DataType, KernelRequest, OptimizerSpec


def request_for(**changes: Any) -> KernelRequest:
    plain = KernelRequest("cpu", DataType.FP32, 16, 16, optimizer=OptimizerSpec("sgd"), on_this_machine=True)
    return attrs.evolve(plain, **changes)


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        ("fused", {"device": "tpu"}, "FBGEMM has no table-batched embedding for 'tpu'; it has for cpu, cuda"),
        ("fused", {"optimizer": None}, "no optimizer was named to run in the backward pass"),
        (
            "fused",
            {"optimizer": OptimizerSpec("adam")},
            "FBGEMM on cpu runs adagrad, row_wise_adagrad, sgd, not 'adam'",
        ),
        (
            "fused",
            {"optimizer": OptimizerSpec("shampoo"), "device": "cuda"},
            "FBGEMM on cuda runs adagrad, adam, row_wise_adagrad, sgd, not 'shampoo'",
        ),
        (
            "fused",
            {"optimizer": OptimizerSpec("adagrad", parameters={"weight_decay": 0.1})},
            "FBGEMM on cpu: 'adagrad' has no parameter weight_decay=0.1 here",
        ),
        ("fused", {"data_type": DataType.BF16}, "FBGEMM on cpu does not train BF16 tables"),
        (
            "fused",
            {"data_type": DataType.INT8, "device": "cuda"},
            "FBGEMM on cuda does not train INT8 tables",
        ),
        (
            "fused",
            {"embedding_dim": 10, "num_columns": 10},
            "FBGEMM needs columns in multiples of 4, the block has 10",
        ),
        (
            "fused",
            {"num_columns": 8, "optimizer": OptimizerSpec("row_wise_adagrad")},
            "'row_wise_adagrad' on 8 of 16 columns needs the gradient of whole rows, "
            "FBGEMM sees its own columns only",
        ),
        ("fused_numba", {"optimizer": None}, "no optimizer was named to run in the backward pass"),
        ("fused_numba", {"device": "cuda"}, "Numba's loops run on the CPU, not on 'cuda'"),
        ("fused_numba", {"data_type": DataType.FP16}, "Numba has no FP16 on the CPU, only FP32"),
        (
            "fused_numba",
            {"optimizer": OptimizerSpec("shampoo")},
            "the Numba kernel: no optimizer 'shampoo' is known, only adagrad, adam, adamw, ftrl, lamb, lars, "
            "partial_row_wise_adam, partial_row_wise_lamb, row_wise_adagrad, sgd",
        ),
        ("fused_triton", {"device": "tpu"}, "its kernels are written for 'cuda', not for 'tpu'"),
        (
            "fused_torch",
            {"optimizer": OptimizerSpec("lamb"), "num_columns": 8},
            "'lamb' on 8 of 16 columns needs the weights of whole rows, and a block of cut columns has its own only",
        ),
        ("fused_torch", {"optimizer": None}, "no optimizer was named to run in the backward pass"),
        (
            "fused_torch",
            {"optimizer": OptimizerSpec("shampoo")},
            "the plain-torch kernel: no optimizer 'shampoo' is known, only adagrad, adam, adamw, ftrl, lamb, lars, "
            "partial_row_wise_adam, partial_row_wise_lamb, row_wise_adagrad, sgd",
        ),
        (
            "fused_torch",
            {"optimizer": OptimizerSpec("adam", parameters={"momentum": 0.1})},
            "the plain-torch kernel: 'adam' has no parameter momentum=0.1.",
        ),
    ],
)
def test_supports_refuses_with_its_reason(kernel: str, changes: dict[str, Any], reason: str) -> None:
    assert kernel_of(kernel).supports(request_for(**changes)) == reason


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        ("dense", {"optimizer": None}),
        ("dense", {"is_pooled": False}),
        ("fused", {"is_pooled": False}),
        ("fused_torch", {"is_pooled": False}),
        ("dense", {"optimizer": OptimizerSpec("shampoo"), "device": "tpu"}),
        ("dense", {"data_type": DataType.BF16, "num_columns": 7}),
        ("fused", {"device": "cuda", "on_this_machine": False, "optimizer": OptimizerSpec("adam")}),
        ("fused", {"num_columns": 8, "optimizer": OptimizerSpec("adagrad")}),
        ("fused", {"data_type": DataType.FP16, "is_weighted": True}),
        ("fused_numba", {"num_columns": 7, "optimizer": OptimizerSpec("row_wise_adagrad")}),
        ("fused_numba", {"is_pooled": False, "optimizer": OptimizerSpec("adam")}),
        ("fused_torch", {"num_columns": 7, "optimizer": OptimizerSpec("row_wise_adagrad")}),
        ("fused_torch", {"data_type": DataType.BF16, "optimizer": OptimizerSpec("adam")}),
        ("fused_torch", {"optimizer": OptimizerSpec("sgd", parameters={"eps": 1.0, "beta1": 0.5})}),
    ],
)
def test_supports_what_it_can_do(kernel: str, changes: dict[str, Any]) -> None:
    skip_unless_here(kernel)
    assert kernel_of(kernel).supports(request_for(**changes)) is True


@pytest.mark.parametrize("data_type", ["INT8", "UINT8", "INT4", "INT2"])
@pytest.mark.parametrize("kernel", kernel_names("cuda"))
def test_supports_refuses_data_types_that_torch_cannot_train(kernel: str, data_type: str) -> None:
    assert kernel_of(kernel).supports(request_for(data_type=DataType(data_type))) is not True


def test_supports_without_fbgemm_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright import _fbgemm

    monkeypatch.setattr(_fbgemm, "_failure", lambda: "ImportError: no such library")
    answer = kernel_of("fused").supports(request_for())
    assert answer == "FBGEMM cannot be used here: ImportError: no such library"
    assert kernel_of("fused_torch").supports(request_for()) is True
    assert kernel_of("fused").supports(request_for(device="cuda", on_this_machine=False)) is True


def test_memory_of_dense_without_optimizer_is_weights_and_gradient() -> None:
    assert kernel_of("dense").memory_bytes(request_for(optimizer=None), 100) == {"device": 2 * 100 * 16 * 4}


def test_supports_without_numba_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel_of("fused_numba").supports(request_for()) == "Numba is not installed (the package is numba)"


def test_preference_takes_fbgemm_where_it_can_and_gradients_only_when_asked() -> None:
    kernels = {name: kernel_of(name) for name in kernel_names("cuda")}
    by_preference = sorted(kernels, key=lambda name: -kernels[name].preference)
    assert [name for name in by_preference if kernels[name].fuses_optimizer] == [
        "fused_numba",
        "fused",
        "fused_torch",
        "fused_triton",
        "fused_uvm_caching",
        "fused_uvm",
        "mapped_caching",
        "pinned_caching",
    ]
    assert [name for name, kernel in kernels.items() if not kernel.fuses_optimizer] == ["dense"]
    assert [name for name, kernel in kernels.items() if not kernel.batch_major] == [
        "dense",
        "fused_torch",
        "mapped_caching",
        "pinned_caching",
    ]
    for kernel in kernels.values():
        assert 0 < kernel.bandwidth_fraction(request_for()) <= 1
        assert sum(kernel.reads(request_for()).values()) == 1


def test_names_of_torchrecs_enumeration_stand_for_registered_kernels() -> None:
    assert ComputeKernel.DENSE.value == "dense"
    assert ComputeKernel.FUSED.value == "fused"
    with pytest.raises(AttributeError, match="Did you mean 'fused'"):
        _ = ComputeKernel.FUSD
