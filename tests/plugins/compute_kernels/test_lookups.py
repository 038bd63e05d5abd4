"""Kernels on a CUDA device, against loops over single rows, and where rows lie; the conformance kit has the rest."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.compute_kernels.loops import (
    OPTIMIZERS,
    block_spec,
    built,
    draw_batch,
    kernel_names,
    supports,
)

from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright_testing.kernels.kernel_checks import gradient_of

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def spec_of(name: str, **parameters: float) -> OptimizerSpec:
    return OptimizerSpec(name, 0.1, parameters)


@pytest.mark.gpu
@pytest.mark.parametrize("data_type", ["FP32", "FP16", "BF16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", kernel_names("cuda"))
def test_kernel_on_cuda_equals_loops(kernel: str, optimizer: str, data_type: str) -> None:
    device = torch.device("cuda")
    blocks = [
        block_spec(rows, 8, slots=slots, optimizer=spec_of(optimizer), data_type=data_type, device="cuda")
        for rows, slots in ((5, 2), (3, 1))
    ]
    if not supports(kernel, blocks):
        pytest.skip(f"{kernel} says it does not support this")
    lookup, loops = built(kernel, blocks, device=device)
    tolerance = CLOSE if data_type == "FP32" else {"rtol": 3e-2, "atol": 3e-2}
    for step in range(3):
        batch = draw_batch(blocks, (2, 3), is_weighted=True, seed=step)
        gradient = gradient_of(loops, batch, step)
        sums, saved = lookup.forward(batch.as_bags(device), training=True)
        torch.testing.assert_close(sums.reshape(-1).double().cpu(), loops.sums(batch), **tolerance)
        if lookup.parameters():
            continue
        lookup.backward(saved, gradient.to(device))
        loops.update(batch, gradient, 0.1)
        for index, expected in enumerate(loops.weights):
            torch.testing.assert_close(lookup.weight(index).double().cpu(), expected, **tolerance)
