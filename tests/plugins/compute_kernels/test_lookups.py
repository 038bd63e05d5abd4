"""Kernels on a CUDA device, against loops over single rows, and where rows lie; the conformance kit has the rest."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.compute_kernels.loops import (
    CPU,
    OPTIMIZERS,
    block_spec,
    built,
    draw_batch,
    kernel_names,
    kernel_of,
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


@pytest.mark.parametrize(
    ("kernel", "optimizer", "state"), [("fused", "adagrad", "sum"), ("fused_numba", "adam", "exp_avg")]
)
def test_rows_begin_with_a_cache_line_whatever_table_is_before(
    kernel: str, optimizer: str, state: str
) -> None:
    """After a table of 3 rows of 8 columns, rows of 16 float32 would lie in two lines each."""
    sizes = [(3, 8), (5, 16), (7, 4), (2, 64)]
    blocks = [block_spec(*size, optimizer=spec_of(optimizer)) for size in sizes]
    if not supports(kernel, blocks):
        pytest.skip(f"{kernel} cannot be used here")
    lookup = kernel_of(kernel).build(blocks, device=CPU)
    for block, size in enumerate(sizes):
        for values in (lookup.weight(block), lookup.optimizer_state(block)[state]):
            assert values.shape == size
            assert values.data_ptr() % 64 == 0
