"""Tests of ``quant_triton``, interpreted on the CPU or compiled on CUDA; ``test_quantized_kernels.py`` runs them."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright_serving as serving
import torch
from shardwright_serving.kernels import _triton_lookup
from shardwright_serving.rows.formats import SERVED
from tests.contrib.serving.tables.test_sharded_quantized import batch, collection, outputs, plan_of, sharded
from tests.plugins.compute_kernels.triton_checks import DEVICE, FULL, Operators
from torch import Tensor

import shardwright as sw
from shardwright.host import host
from shardwright_testing import ServingKernelTests, run_simulated
from shardwright_testing.kernels.kernel_groups import draw
from shardwright_testing.kernels.loops import block_spec, draw_sequences

# Less than a byte, a power of 2, and no power of 2: rows end within bytes and words.
WIDTHS = (1, 16, 23)


def kernel() -> sw.ComputeKernel:
    return host().compute_kernels.create("quant_triton")


@pytest.mark.skipif(FULL, reason="the kit runs on the CPU")
class TestQuantTriton(ServingKernelTests):
    @pytest.fixture
    def compute_kernel(self) -> sw.ComputeKernel:
        return kernel()


def blocks_of(precision: str, widths: tuple[int, ...], pooling: str = "SUM") -> list[sw.BlockSpec]:
    return [
        block_spec(
            9, width, data_type=precision, pooling=pooling, device=DEVICE.type, optimizer=None, is_frozen=True
        )
        for width in widths
    ]


def built(kernel: sw.ComputeKernel, blocks: list[sw.BlockSpec], device: torch.device) -> Any:
    lookup = kernel.build(blocks, device=device)
    for index, spec in enumerate(blocks):
        generator = torch.Generator().manual_seed(index)
        # Some rows are tiny: FP8 and FP16 have subnormal numbers in them.
        whole = (
            torch.randn(9, spec.block.num_columns, generator=generator) * 10.0 ** -torch.arange(9)[:, None]
        )
        lookup.adopt(index, serving.quantize_rows(whole, spec.table.data_type).packed().to(device))
    return lookup


def plain(blocks: list[sw.BlockSpec], batch: Any) -> Tensor:
    """What ``quant_torch`` gives on the CPU for blocks of one width, bag after bag."""
    lookup = built(host().compute_kernels.create("quant_torch"), blocks, torch.device("cpu"))
    found: Tensor = lookup.forward(batch.as_bags(), training=False)[0]
    return found.reshape(-1, blocks[0].block.num_columns)


@pytest.mark.parametrize("precision", [str(one) for one in SERVED])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_quantized_sums_have_the_bits_of_plain_torch(precision: str, is_weighted: bool) -> None:
    for width in WIDTHS:
        blocks = blocks_of(precision, (width, width))
        batch = draw(blocks, (5,), is_weighted=is_weighted, max_length=7)
        lookup = built(kernel(), blocks, DEVICE)
        found = lookup.forward(batch.as_bags(DEVICE), training=False)[0].cpu()
        # Bag by bag of all slots, and slot after slot.
        by_slot = found.view(5, 2, width).transpose(0, 1).reshape(-1, width)
        assert torch.equal(by_slot, plain(blocks, batch))


@pytest.mark.parametrize("precision", [str(one) for one in SERVED])
def test_quantized_sequences_have_the_bits_of_plain_torch(precision: str) -> None:
    blocks = blocks_of(precision, (23, 23), "NONE")
    batch = draw_sequences(blocks, 2, max_ids=5)
    found = built(kernel(), blocks, DEVICE).forward(batch.as_bags(DEVICE), training=False)[0]
    assert torch.equal(found.cpu().view(-1, 23), plain(blocks, batch))


def test_quantized_widths_are_read_by_one_launch_that_asks_the_host_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = blocks_of("INT4", WIDTHS)
    assert len({kernel().group_key(spec.request) for spec in blocks}) == 1
    lookup = built(kernel(), blocks, DEVICE)
    batch = draw(blocks, (3,), is_weighted=True)
    found = lookup.forward(batch.as_bags(DEVICE), training=False)[0].cpu()
    for slot, own in enumerate(found.view(3, -1).split(WIDTHS, dim=1)):
        rows = serving.QuantizedRows(
            blocks[slot].request.data_type, WIDTHS[slot], lookup.weight(slot).cpu()
        ).dequantized()
        wanted = [
            sum((w * rows[row] for row, w in bag), torch.zeros(WIDTHS[slot])) for bag in batch.bags[0][slot]
        ]
        torch.testing.assert_close(own, torch.stack(wanted))
    launched: list[str] = []
    bags = batch.as_bags(DEVICE)
    monkeypatch.setattr(_triton_lookup, "launch", lambda kernel, *_, **__: launched.append(kernel.__name__))
    with Operators() as operators:
        lookup.forward(bags, training=False)
    assert launched == ["look_up_rows"]
    assert operators.names == ["aten.cumsum.default"]


@pytest.mark.skipif(FULL, reason="simulated ranks run on the CPU")
@pytest.mark.parametrize("precision", ["INT2", "FP16"])
def test_sharded_collections_equal_unsharded_and_keep_their_rows(precision: str) -> None:
    """Cut columns of two bits are in rows of one byte, scale and bias: the last word of each row is filled up."""
    quantized = serving.quantize_embeddings(collection("SUM", is_weighted=True), precision)
    plan = plan_of(torch.nn.Sequential(quantized), "column_wise", 2, "quant_triton")

    def on_rank(env: sw.ShardingEnv) -> None:
        model = sharded(env, torch.nn.Sequential(quantized), plan)
        with torch.no_grad():
            assert torch.equal(outputs(model(batch(env.rank))), outputs(quantized(batch(env.rank))))
        wanted = torch.nn.Sequential(quantized).state_dict()
        assert all(torch.equal(own, wanted[name]) for name, own in model.full_state_dict().items())

    by_default = outputs(quantized(batch(0)))
    quantized.use_kernel("quant_triton")
    torch.testing.assert_close(outputs(quantized(batch(0))), by_default)
    run_simulated(on_rank, 2)
