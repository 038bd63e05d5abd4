"""Threads of the ``fused`` kernel: tables are dealt to them, and the bits are those of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.plugins.compute_kernels.loops import CPU, block_spec, built, draw_batch, draw_sequences, kernel_of

from shardwright import Bags, OptimizerSpec
from shardwright_testing.kernels.kernel_checks import train

pytest.importorskip("fbgemm_gpu")

ROWS, DIM, SLOTS_OF = 50, 8, (1, 2, 1, 1)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bags_of(batch: int, pooled: bool, seed: int, ragged: bool = False) -> Bags:
    """Bags of two sources; ragged cells of sequences."""
    generator = torch.Generator().manual_seed(seed)
    counts = (
        torch.full((2, sum(SLOTS_OF)), batch)
        if pooled and not ragged
        else torch.randint(0, batch + 1 if pooled else 4, (2, sum(SLOTS_OF)), generator=generator)
    )
    num_bags = int(counts.sum())
    lengths = torch.randint(0, 4, (num_bags,), generator=generator, dtype=torch.int32) if pooled else None
    num_ids = num_bags if lengths is None else int(lengths.sum())
    weights = torch.rand(num_ids, generator=generator) if pooled else None
    ids = torch.randint(ROWS, (num_ids,), generator=generator)
    return Bags(ids, lengths, weights, counts.numpy(), ragged)


def trained(
    num_threads: int, pooled: bool, batch: int, ragged: bool = False
) -> tuple[int, list[torch.Tensor]]:
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
        result, saved = lookup.forward(bags_of(batch, pooled, seed, ragged), training=True)
        generator = torch.Generator().manual_seed(seed)
        lookup.backward(saved, torch.randn(result.numel(), generator=generator))
        found.append(result)
    states = [own for block in range(len(blocks)) for own in lookup.optimizer_state(block).values()]
    return len(lookup._parts), found + [lookup.weight(block) for block in range(len(blocks))] + states


@pytest.mark.parametrize("batch", [0, 6])
@pytest.mark.parametrize(("pooled", "ragged"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_fused_with_several_threads_gives_the_same_bits(
    threads: None, num_threads: int, pooled: bool, ragged: bool, batch: int
) -> None:
    num_parts, values = trained(num_threads, pooled, batch, ragged)
    assert num_parts == min(num_threads, len(SLOTS_OF))
    one, expected = trained(1, pooled, batch, ragged)
    assert one == 1
    assert all(torch.equal(value, other) for value, other in zip(values, expected, strict=True))


@pytest.mark.parametrize("most_rows", [1 << 31, 64])
@pytest.mark.parametrize("data_type", ["FP32", "FP16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row_wise_adagrad"])
def test_ragged_bags_of_one_width_are_looked_up_as_they_came_as_bags_of_one_table(
    monkeypatch: pytest.MonkeyPatch, threads: None, optimizer: str, data_type: str, most_rows: int
) -> None:
    """FBGEMM sorts rows of a table as 32-bit numbers: more rows are several tables. All stored rows count."""
    from shardwright_plugins.compute_kernels.fbgemm import _fused_lookup

    torch.set_num_threads(1)
    monkeypatch.setattr(_fused_lookup, "_MOST_ROWS", most_rows)
    spec = OptimizerSpec(optimizer, 0.1)
    blocks = [
        block_spec(rows, 8, slots=slots, optimizer=spec, data_type=data_type)
        for rows, slots in ((5, 2), (30, 1), (40, 1), (3, 2))
    ]
    assert kernel_of("fused").takes_ragged_bags  # else the engine fills them up
    lookup, loops = built("fused", blocks)
    asked: list[tuple[Any, ...]] = []
    looked_up = _fused_lookup._looked_up
    monkeypatch.setattr(
        _fused_lookup, "_looked_up", lambda own, **kwargs: looked_up(asked.extend(own) or own, **kwargs)
    )
    num_runs = 1 if most_rows > 64 else 2
    for step, sources in enumerate(((3,), (2, 4), (0, 0), (4, 0, 1))):
        batch = draw_batch(blocks, sources, is_weighted=step % 2 == 0, seed=step).ragged()
        train(f"ragged bags, {optimizer}", lookup, loops, batch, CPU, seed=step)
        assert len(asked) == num_runs
        assert all(int(run.tables.rows_per_table) < most_rows for run, *_ in asked)
        assert sum(len(offsets) - 1 for _, _, offsets, _ in asked) == len(batch.flat())
        asked.clear()


def test_every_run_of_ragged_bags_counts_its_own_lookups_and_goes_on_from_a_loaded_step() -> None:
    """FBGEMM corrects Adam's biases by the number of an embedding's lookups."""
    optimizer = OptimizerSpec("row_wise_adagrad", 0.1)
    blocks = [block_spec(5, dim, optimizer=optimizer) for dim in (8, 16, 8)]
    lookup, _ = built("fused", blocks)
    tables = [run.tables for run in lookup._runs]
    assert [(len(own.D_offsets), own.total_D) for own in tables] == [(2, 8), (2, 16), (2, 8)]
    lookup.load_step(7)
    assert [int(own.iter) for own in tables] == [7] * 3
    lookup.forward(draw_batch(blocks, (2, 3), is_weighted=False).ragged().as_bags(), training=True)
    assert [int(own.iter) for own in tables] == [8] * 3


def test_ragged_bags_of_many_slots_may_be_as_many_as_those_of_one_slot() -> None:
    """FBGEMM's backward pass on devices has 32 bits for a feature's number and a bag's: of 1000 features, 2^23 bags."""
    blocks = [block_spec(3, 4, optimizer=OptimizerSpec("sgd", 0.1)) for _ in range(1000)]
    (run,), (one,) = (built("fused", own)[0]._runs for own in (blocks, blocks[:1]))
    assert run.tables.info_B_num_bits == one.tables.info_B_num_bits > 26
    assert run.tables.info_B_mask == one.tables.info_B_mask == (1 << one.tables.info_B_num_bits) - 1


def test_sequences_with_a_bag_for_each_id_as_on_devices_train_as_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One warp a bag: on CUDA a slot's ids are not one bag."""
    from shardwright_plugins.compute_kernels.fbgemm import _bags, _fused_lookup

    seen = []
    offsets_of_ids = _bags.offsets_of_ids
    monkeypatch.setattr(_bags, "is_host", lambda _: False)
    monkeypatch.setattr(
        _fused_lookup, "offsets_of_ids", lambda *args: seen.append(offsets_of_ids(*args)) or seen[-1]
    )
    optimizer = OptimizerSpec("row_wise_adagrad", 0.1)
    blocks = [block_spec(rows, 8, slots=2, optimizer=optimizer, pooling="NONE") for rows in (5, 3)]
    lookup, loops = built("fused", blocks)
    for step, max_ids in enumerate((6, 1, 0, 9)):
        batch = draw_sequences(blocks, 2, seed=step, max_ids=max_ids)
        train("a bag for each id", lookup, loops, batch, CPU, seed=step)
        assert int(seen[-1].diff().max()) <= 1
