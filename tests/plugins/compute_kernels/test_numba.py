"""What the ``fused_numba`` kernel alone promises: the same bits with any number of threads, and no id that reads memory
it must not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.plugins.compute_kernels.loops import CPU, block_spec, kernel_of

from shardwright.planning.optimizers import OptimizerSpec
from shardwright.runtime.lookup import Bags, Lookup

pytest.importorskip("numba")

ROWS, DIM, SLOTS, BATCH, IDS = 300, 64, 5, 80, 6


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def built() -> Lookup:
    optimizer = OptimizerSpec("row_wise_adagrad", 0.1)
    blocks = [block_spec(ROWS, DIM, slots=slots, optimizer=optimizer) for slots in (1, 3, 1)]
    lookup = kernel_of("fused_numba").build(blocks, device=CPU)
    for block in range(3):
        lookup.weight(block).copy_(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(block)))
    return lookup


def bags_of(ids: torch.Tensor) -> Bags:
    lengths = torch.full((2 * SLOTS * BATCH,), IDS, dtype=torch.int32)
    return Bags(ids, lengths, None, ((BATCH,) * SLOTS,) * 2)


def trained(num_threads: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    lookup = built()
    for _ in range(3):
        ids = torch.randint(ROWS, (2 * SLOTS * BATCH * IDS,), generator=generator)
        result, saved = lookup.forward(bags_of(ids), training=True)
        lookup.backward(saved, torch.randn(result.numel(), generator=generator))
    return result, [lookup.weight(block).clone() for block in range(3)]


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_numba_with_several_threads_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, threads: None, num_threads: int
) -> None:
    from shardwright_plugins.compute_kernels import _fused_numba_lookup

    used: list[int] = []
    executor_of = _fused_numba_lookup._threads
    monkeypatch.setattr(
        _fused_numba_lookup, "_threads", lambda pid, count: used.append(count) or executor_of(pid, count)
    )
    monkeypatch.setattr(_fused_numba_lookup, "_ELEMENTS_PER_THREAD", 1000)
    result, weights = trained(num_threads)
    assert used
    used.clear()
    expected_result, expected_weights = trained(1)
    assert not used
    assert torch.equal(result, expected_result)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected_weights, strict=True))


@pytest.mark.parametrize("wrong", [-1, ROWS, 2**40])
def test_numba_refuses_an_id_that_is_no_row(wrong: int) -> None:
    ids = torch.zeros(2 * SLOTS * BATCH * IDS, dtype=torch.int64)
    ids[777] = wrong
    with pytest.raises(IndexError, match="no row of its table"):
        built().forward(bags_of(ids), training=True)
