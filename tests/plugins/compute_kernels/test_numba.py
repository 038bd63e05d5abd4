"""What the ``fused_numba`` kernel alone promises: the same bits with any number of threads, and no id that reads memory
it must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.plugins.compute_kernels.loops import CPU, block_spec, kernel_of

from shardwright import Bags, Lookup, OptimizerSpec

pytest.importorskip("numba")

ROWS, DIM, SLOTS, BATCH, IDS = 300, 64, 5, 80, 6


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


SEVERAL, ONE_TABLE, ONE_SLOT = (1, 3, 1), (5,), (1,)


def built(slots_of: tuple[int, ...] = SEVERAL, optimizer: str = "row_wise_adagrad") -> Lookup:
    spec = OptimizerSpec(optimizer, 0.1)
    blocks = [block_spec(ROWS, DIM, slots=slots, optimizer=spec) for slots in slots_of]
    lookup = kernel_of("fused_numba").build(blocks, device=CPU)
    for block in range(len(blocks)):
        lookup.weight(block).copy_(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(block)))
    return lookup


def bags_of(ids: torch.Tensor, slots: int = SLOTS) -> Bags:
    """Bags of different lengths, `IDS` ids in the mean."""
    lengths = torch.arange(2 * slots * BATCH, dtype=torch.int32) % (2 * IDS - 1) + 1
    lengths[-1] += ids.numel() - lengths.sum()
    weights = torch.linspace(0.5, 2, ids.numel())
    return Bags(ids, lengths, weights, ((BATCH,) * slots,) * 2)


def trained(
    num_threads: int, slots_of: tuple[int, ...], optimizer: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    lookup = built(slots_of, optimizer)
    for _ in range(3):
        ids = torch.randint(ROWS, (2 * sum(slots_of) * BATCH * IDS,), generator=generator)
        result, saved = lookup.forward(bags_of(ids, sum(slots_of)), training=True)
        lookup.backward(saved, torch.randn(result.numel(), generator=generator))
    states = [value for block in range(len(slots_of)) for value in lookup.optimizer_state(block).values()]
    return result, [lookup.weight(block).clone() for block in range(len(slots_of))] + states


@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "adam"])
@pytest.mark.parametrize("slots_of", [SEVERAL, ONE_TABLE, ONE_SLOT])
@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_numba_with_several_threads_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    threads: None,
    num_threads: int,
    slots_of: tuple[int, ...],
    optimizer: str,
) -> None:
    from shardwright_plugins.compute_kernels import _threads
    from shardwright_plugins.compute_kernels.fused_numba import _lookup

    used: list[int] = []
    shares_of = _lookup.shares_of

    def shares(*args: Any, **kwargs: Any) -> Any:
        found = shares_of(*args, **kwargs)
        used.append(len(found))
        return found

    monkeypatch.setattr(_lookup, "shares_of", shares)
    monkeypatch.setattr(_threads, "_ELEMENTS_PER_THREAD", 1000)
    result, changed = trained(num_threads, slots_of, optimizer)
    assert set(used) == {num_threads}  # forward and backward passes alike
    used.clear()
    expected_result, expected = trained(1, slots_of, optimizer)
    assert set(used) == {1}
    assert torch.equal(result, expected_result)
    assert all(torch.equal(one, other) for one, other in zip(changed, expected, strict=True))


@pytest.mark.parametrize("wrong", [-1, ROWS, 2**40])
def test_numba_refuses_an_id_that_is_no_row(wrong: int) -> None:
    ids = torch.zeros(2 * SLOTS * BATCH * IDS, dtype=torch.int64)
    ids[777] = wrong
    with pytest.raises(IndexError, match="no row of its table"):
        built().forward(bags_of(ids), training=True)


@pytest.mark.parametrize("optimizer", ["adagrad", "row_wise_adagrad"])
def test_numba_updates_divide_by_zero_as_torch_does(optimizer: str) -> None:
    spec = OptimizerSpec(optimizer, 0.1, parameters=(("eps", 0.0),))
    lookup = kernel_of("fused_numba").build([block_spec(4, 2, optimizer=spec)], device=CPU)
    lookup.weight(0).fill_(1.0)
    ids = torch.tensor([0, 1])
    _, saved = lookup.forward(
        Bags(ids, torch.tensor([1, 1], dtype=torch.int32), None, ((2,),)), training=True
    )
    lookup.backward(saved, torch.tensor([0.0, 0.0, 1.0, 1.0]))  # 0 / 0 in row 0
    assert lookup.weight(0)[0].isnan().all()
    torch.testing.assert_close(lookup.weight(0)[1:], torch.tensor([[0.9, 0.9], [1.0, 1.0], [1.0, 1.0]]))
