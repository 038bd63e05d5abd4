"""Threads of the ``fused`` kernel: tables are dealt to them, and the bits are those of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.plugins.compute_kernels.loops import CPU, block_spec, kernel_of

from shardwright.contracts.lookup import Bags
from shardwright.planning.tables.optimizers import OptimizerSpec

pytest.importorskip("fbgemm_gpu")

ROWS, DIM, SLOTS_OF = 50, 8, (1, 2, 1, 1)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bags_of(batch: int, pooled: bool, seed: int) -> Bags:
    """Bags of two sources; ragged cells of sequences."""
    generator = torch.Generator().manual_seed(seed)
    counts = (
        torch.full((2, sum(SLOTS_OF)), batch)
        if pooled
        else torch.randint(0, 4, (2, sum(SLOTS_OF)), generator=generator)
    )
    num_bags = int(counts.sum())
    lengths = torch.randint(0, 4, (num_bags,), generator=generator, dtype=torch.int32) if pooled else None
    num_ids = num_bags if lengths is None else int(lengths.sum())
    weights = torch.rand(num_ids, generator=generator) if pooled else None
    ids = torch.randint(ROWS, (num_ids,), generator=generator)
    return Bags(ids, lengths, weights, counts.numpy())


def trained(num_threads: int, pooled: bool, batch: int) -> tuple[int, list[torch.Tensor]]:
    """How many embeddings there are; results, weights and state."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    spec = OptimizerSpec("row_wise_adagrad", 0.1)
    pooling = "SUM" if pooled else "NONE"
    blocks = [block_spec(ROWS, DIM, slots=slots, optimizer=spec, pooling=pooling) for slots in SLOTS_OF]
    lookup: Any = kernel_of("fused").build(blocks, device=CPU)
    for block in range(len(blocks)):
        lookup.weight(block).copy_(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(block)))
    found = []
    for seed in range(3):
        result, saved = lookup.forward(bags_of(batch, pooled, seed), training=True)
        generator = torch.Generator().manual_seed(seed)
        lookup.backward(saved, torch.randn(result.numel(), generator=generator))
        found.append(result)
    states = [own for block in range(len(blocks)) for own in lookup.optimizer_state(block).values()]
    return len(lookup._parts), found + [lookup.weight(block) for block in range(len(blocks))] + states


@pytest.mark.parametrize("batch", [0, 6])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_fused_with_several_threads_gives_the_same_bits(
    threads: None, num_threads: int, pooled: bool, batch: int
) -> None:
    num_parts, values = trained(num_threads, pooled, batch)
    assert num_parts == min(num_threads, len(SLOTS_OF))
    one, expected = trained(1, pooled, batch)
    assert one == 1
    assert all(torch.equal(value, other) for value, other in zip(values, expected, strict=True))
