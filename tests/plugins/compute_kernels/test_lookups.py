"""Every registered kernel through the `Lookup` contract, against loops over single rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.plugins.compute_kernels.loops import (
    OPTIMIZERS,
    Batch,
    Loops,
    block_spec,
    built,
    draw_batch,
    draw_sequences,
    kernel_names,
    kernel_of,
    supports,
)

from shardwright.planning.optimizers import OptimizerSpec
from shardwright.runtime.lookup import BlockSpec

SOURCES = [(3,), (2, 3), (4, 0, 1), (2, 2), (0, 0), (0,)]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def spec_of(name: str, **parameters: float) -> OptimizerSpec:
    return OptimizerSpec(name, 0.1, parameters)


def groups_of(
    kernel: str, optimizer: OptimizerSpec, *, data_type: str = "FP32", pooling: str = "SUM"
) -> list[list[BlockSpec]]:
    """Blocks of several sizes, widths and numbers of features, in the groups that the kernel asks for."""
    blocks = [
        block_spec(rows, dim, slots=slots, optimizer=optimizer, data_type=data_type, pooling=pooling)
        for rows, dim, slots in ((5, 8, 2), (1, 8, 1), (3, 4, 1), (4, 8, 1))
    ]
    groups: dict[object, list[BlockSpec]] = {}
    for spec in blocks:
        groups.setdefault(kernel_of(kernel).group_key(spec.request), []).append(spec)
    return list(groups.values())


def skip_unless_supported(kernel: str, groups: Sequence[Sequence[BlockSpec]]) -> None:
    if not all(supports(kernel, blocks) for blocks in groups):
        pytest.skip(f"{kernel} says it does not support this")


def gradient_for(loops: Loops, batch: Batch, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(loops.size(batch, of_gradients=True), generator=generator) - 0.5


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("sources", SOURCES, ids=str)
@pytest.mark.parametrize("kernel", kernel_names())
def test_forward_sums_each_bag(kernel: str, sources: tuple[int, ...], is_weighted: bool) -> None:
    for blocks in groups_of(kernel, spec_of("sgd")):
        lookup, loops = built(kernel, blocks)
        batch = draw_batch(blocks, sources, is_weighted=is_weighted)
        for training in (True, False):
            sums, _ = lookup.forward(batch.as_bags(), training=training)
            assert sums.dtype == torch.float32
            assert not sums.requires_grad
            torch.testing.assert_close(sums.reshape(-1).double(), loops.sums(batch), **CLOSE)


@pytest.mark.parametrize("kernel", kernel_names())
def test_forward_of_bags_without_ids_is_zero(kernel: str) -> None:
    (blocks, *_) = groups_of(kernel, spec_of("sgd"))
    lookup, loops = built(kernel, blocks)
    batch = draw_batch(blocks, (2, 1), is_weighted=True, max_length=0)
    sums, saved = lookup.forward(batch.as_bags(), training=True)
    assert sums.numel() == loops.size(batch, of_gradients=False) > 0
    assert not sums.any()
    before = [lookup.weight(index).clone() for index in range(len(blocks))]
    gradients = lookup.backward(saved, torch.ones(loops.size(batch, of_gradients=True)))
    assert all(gradient is None or not gradient.any() for gradient in gradients)
    assert all(torch.equal(lookup.weight(index), weight) for index, weight in enumerate(before))


@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
@pytest.mark.parametrize("kernel", kernel_names())
def test_forward_of_halves_sums_in_float32(kernel: str, data_type: str) -> None:
    groups = groups_of(kernel, spec_of("sgd"), data_type=data_type)
    skip_unless_supported(kernel, groups)
    for blocks in groups:
        lookup, loops = built(kernel, blocks)
        batch = draw_batch(blocks, (3, 2), is_weighted=True, max_length=40)
        sums, _ = lookup.forward(batch.as_bags(), training=False)
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums.reshape(-1).double(), loops.sums(batch), **CLOSE)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("sources", SOURCES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", kernel_names())
def test_backward_updates_rows_or_shows_their_gradients(
    kernel: str, optimizer: str, sources: tuple[int, ...], is_weighted: bool
) -> None:
    groups = groups_of(kernel, spec_of(optimizer))
    skip_unless_supported(kernel, groups)
    for blocks in groups:
        lookup, loops = built(kernel, blocks)
        for step in range(4):
            batch = draw_batch(blocks, sources, is_weighted=is_weighted, seed=step, max_length=5 * (step % 3))
            gradient = gradient_for(loops, batch, step)
            _, saved = lookup.forward(batch.as_bags(), training=True)
            if lookup.parameters():
                assert_gradients(lookup, loops, batch, gradient, saved)
                continue
            assert list(lookup.backward(saved, gradient)) == []
            loops.update(batch, gradient, 0.1)
            for index, expected in enumerate(loops.weights):
                torch.testing.assert_close(lookup.weight(index).double(), expected, **CLOSE)


@pytest.mark.parametrize("num_sources", [1, 2, 3])
@pytest.mark.parametrize("data_type", ["FP32", "FP16", "BF16"])
@pytest.mark.parametrize("kernel", kernel_names())
def test_forward_of_sequences_is_the_ids_rows_in_the_order_they_came(
    kernel: str, data_type: str, num_sources: int
) -> None:
    groups = groups_of(kernel, spec_of("sgd"), data_type=data_type, pooling="NONE")
    skip_unless_supported(kernel, groups)
    for blocks in groups:
        lookup, loops = built(kernel, blocks)
        for max_ids in (0, 6):
            batch = draw_sequences(blocks, num_sources, max_ids=max_ids)
            rows, _ = lookup.forward(batch.as_bags(), training=False)
            assert (rows.dtype, rows.requires_grad) == (torch.float32, False)
            wanted = [
                loops.weights[loops.block_of_slot[slot]][row]
                for slots in batch.bags
                for slot, ids in enumerate(slots)
                for ((row, _),) in ids
            ]
            expected = torch.cat(wanted).float() if wanted else torch.empty(0)
            assert torch.equal(rows.reshape(-1), expected)


@pytest.mark.parametrize("num_sources", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", kernel_names())
def test_backward_of_sequences_updates_rows_or_shows_their_gradients(
    kernel: str, optimizer: str, num_sources: int
) -> None:
    groups = groups_of(kernel, spec_of(optimizer), pooling="NONE")
    skip_unless_supported(kernel, groups)
    for blocks in groups:
        lookup, loops = built(kernel, blocks)
        for step, max_ids in enumerate((6, 0, 1, 30)):
            batch = draw_sequences(blocks, num_sources, seed=step, max_ids=max_ids)
            gradient = gradient_for(loops, batch, step)
            _, saved = lookup.forward(batch.as_bags(), training=True)
            if lookup.parameters():
                assert_gradients(lookup, loops, batch, gradient, saved)
                continue
            assert list(lookup.backward(saved, gradient)) == []
            loops.update(batch, gradient, 0.1)
            for index, expected in enumerate(loops.weights):
                torch.testing.assert_close(lookup.weight(index).double(), expected, **CLOSE)


@pytest.mark.parametrize("is_pooled", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", kernel_names())
def test_prepare_serves_backward_as_what_forward_saved_does(
    kernel: str, optimizer: str, is_pooled: bool
) -> None:
    groups = groups_of(kernel, spec_of(optimizer), pooling="SUM" if is_pooled else "NONE")
    skip_unless_supported(kernel, groups)
    for blocks in groups:
        looked_up, loops = built(kernel, blocks)
        prepared, _ = built(kernel, blocks)
        for step in range(3):
            if is_pooled:
                batch = draw_batch(blocks, (2, 3), is_weighted=True, seed=step)
            else:
                batch = draw_sequences(blocks, 2, seed=step)
            gradient = gradient_for(loops, batch, step)
            _, saved = looked_up.forward(batch.as_bags(), training=True)
            shown = looked_up.backward(saved, gradient.clone())
            shown_too = prepared.backward(prepared.prepare(batch.as_bags()), gradient.clone())
            assert len(shown) == len(shown_too)
            assert all(torch.equal(one, other) for one, other in zip(shown, shown_too, strict=True))
            for index in range(len(blocks)):
                assert torch.equal(looked_up.weight(index), prepared.weight(index))
        if not prepared.parameters():  # they did move
            assert not torch.equal(prepared.weight(0).double(), loops.weights[0])


def assert_gradients(lookup, loops, batch, gradient, saved) -> None:
    expected = [torch.zeros_like(weight) for weight in loops.weights]
    for (block, row), value in loops.row_gradients(batch, gradient).items():
        expected[block][row] = value
    shown = lookup.backward(saved, gradient)
    assert len(shown) == len(lookup.parameters()) == len(expected)
    for actual, value in zip(shown, expected, strict=True):
        torch.testing.assert_close(actual.double(), value, **CLOSE)


@pytest.mark.parametrize(
    "optimizer",
    [
        spec_of("adagrad", eps=0.3),
        spec_of("row_wise_adagrad", eps=0.3),
        spec_of("adam", eps=0.1, beta1=0.5, beta2=0.8),
        spec_of("sgd", eps=1e-8, beta1=0.9, weight_decay=0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", kernel_names())
def test_backward_uses_the_optimizers_parameters(kernel: str, optimizer: OptimizerSpec) -> None:
    (blocks, *_) = groups_of(kernel, optimizer)
    skip_unless_supported(kernel, [blocks])
    if not kernel_of(kernel).fuses_optimizer:
        pytest.skip("the optimizer is the user's")
    lookup, loops = built(kernel, blocks)
    for step in range(3):
        train(lookup, loops, step, 0.1)
    for index, expected in enumerate(loops.weights):
        torch.testing.assert_close(lookup.weight(index).double(), expected, **CLOSE)


def train(lookup, loops, step: int, learning_rate: float) -> None:
    batch = draw_batch(loops.blocks, (2, 3), is_weighted=True, seed=step)
    gradient = gradient_for(loops, batch, step)
    _, saved = lookup.forward(batch.as_bags(), training=True)
    lookup.backward(saved, gradient)
    loops.update(batch, gradient, learning_rate)


def fused_kernels() -> list[str]:
    return [name for name in kernel_names() if kernel_of(name).fuses_optimizer]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", fused_kernels())
def test_learning_rate_holds_from_the_next_forward_pass(kernel: str, optimizer: str) -> None:
    (blocks, *_) = groups_of(kernel, spec_of(optimizer))
    skip_unless_supported(kernel, [blocks])
    lookup, loops = built(kernel, blocks)
    for step, rate in enumerate((0.1, 0.7, 0.0, 0.01)):
        lookup.set_learning_rate(rate)
        train(lookup, loops, step, rate)
        for index, expected in enumerate(loops.weights):
            torch.testing.assert_close(lookup.weight(index).double(), expected, **CLOSE)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", fused_kernels())
def test_optimizer_state_is_that_of_the_rows_and_continues_in_another_lookup(
    kernel: str, optimizer: str
) -> None:
    (blocks, *_) = groups_of(kernel, spec_of(optimizer))
    skip_unless_supported(kernel, [blocks])
    lookup, loops = built(kernel, blocks)
    for step in range(3):
        train(lookup, loops, step, 0.1)
    names = {"sgd": (), "adam": ("exp_avg", "exp_avg_sq")}.get(optimizer, ("sum",))
    fresh, _ = built(kernel, blocks, seed=9)
    for index, spec in enumerate(blocks):
        state = lookup.optimizer_state(index)
        assert set(state) == ({"step", *names} if names else set())
        if names:
            assert float(state["step"]) == 3
        for number, name in enumerate(names):
            columns = 1 if name in lookup.states_per_row else spec.block.num_columns
            assert state[name].shape == (spec.block.num_rows, columns)
            for row in range(spec.block.num_rows):
                expected = loops.state.get((index, row), [torch.zeros(columns).double()] * 2)[number]
                torch.testing.assert_close(state[name][row].double(), expected[:columns], **CLOSE)
            fresh.optimizer_state(index)[name].copy_(state[name])
        fresh.weight(index).copy_(lookup.weight(index))
    fresh.load_step(3)
    assert lookup.states_per_row == ({"sum"} if optimizer == "row_wise_adagrad" else frozenset())
    train(fresh, loops, 3, 0.1)
    for index, expected in enumerate(loops.weights):
        torch.testing.assert_close(fresh.weight(index).double(), expected, **CLOSE)


@pytest.mark.parametrize("kernel", kernel_names())
def test_kernel_that_needs_whole_rows_is_exact_on_cut_columns(kernel: str) -> None:
    blocks = [
        block_spec(rows, 12, columns=(4, 8), slots=slots, optimizer=spec_of("row_wise_adagrad"))
        for rows, slots in ((5, 2), (3, 1))
    ]
    skip_unless_supported(kernel, [blocks])
    if not kernel_of(kernel).needs_whole_rows(blocks[0].request):
        pytest.skip(f"{kernel} needs no whole rows")
    lookup, loops = built(kernel, blocks)
    assert loops.gradient_dim(0) == 12
    for step in range(3):
        train(lookup, loops, step, 0.1)
    for index, expected in enumerate(loops.weights):
        torch.testing.assert_close(lookup.weight(index).double(), expected, **CLOSE)


@pytest.mark.parametrize("kernel", kernel_names())
def test_two_forwards_before_the_backwards_keep_apart(kernel: str) -> None:
    (blocks, *_) = groups_of(kernel, spec_of("sgd"))
    lookup, loops = built(kernel, blocks)
    batches = [draw_batch(blocks, (3,), is_weighted=True, seed=seed) for seed in (1, 2)]
    saved = [lookup.forward(batch.as_bags(), training=True)[1] for batch in batches]
    for batch, kept in reversed(list(zip(batches, saved, strict=True))):
        gradient = gradient_for(loops, batch, 5)
        if lookup.parameters():
            assert_gradients(lookup, loops, batch, gradient, kept)
        else:
            lookup.backward(kept, gradient)
            loops.update(batch, gradient, 0.1)
    for index, expected in enumerate(loops.weights):
        torch.testing.assert_close(lookup.weight(index).double(), expected, **CLOSE)


@pytest.mark.parametrize("kernel", kernel_names())
def test_weight_and_parameters_share_storage_with_what_is_looked_up(kernel: str) -> None:
    (blocks, *_) = groups_of(kernel, spec_of("sgd"))
    lookup, _ = built(kernel, blocks)
    for index, spec in enumerate(blocks):
        lookup.weight(index).fill_(index + 1)
        assert lookup.weight(index).shape == (spec.block.num_rows, spec.block.num_columns)
        assert not lookup.weight(index).requires_grad
    for index, parameter in enumerate(lookup.parameters()):
        assert (parameter == index + 1).all()
    batch = Batch([[[[(0, 1.0)]] for spec in blocks for _ in range(spec.num_slots)]], False)
    sums, _ = lookup.forward(batch.as_bags(), training=False)
    slots = [float(index + 1) for index, spec in enumerate(blocks) for _ in range(spec.num_slots * 8)]
    assert sums.reshape(-1)[:8].tolist() == slots[:8]
    assert set(sums.reshape(-1).tolist()) == set(slots)


@pytest.mark.parametrize("kernel", kernel_names())
def test_forward_in_inference_mode_is_the_same(kernel: str) -> None:
    (blocks, *_) = groups_of(kernel, spec_of("sgd"))
    lookup, loops = built(kernel, blocks)
    batch = draw_batch(blocks, (3,), is_weighted=True)
    with torch.inference_mode():
        sums, _ = lookup.forward(batch.as_bags(), training=False)
    torch.testing.assert_close(sums.reshape(-1).double(), loops.sums(batch), **CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("data_type", ["FP32", "FP16", "BF16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", kernel_names("cuda"))
def test_kernel_on_cuda_equals_loops(kernel: str, optimizer: str, data_type: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    blocks = [
        block_spec(rows, 8, slots=slots, optimizer=spec_of(optimizer), data_type=data_type, device="cuda")
        for rows, slots in ((5, 2), (3, 1))
    ]
    skip_unless_supported(kernel, [blocks])
    lookup, loops = built(kernel, blocks, device=device)
    tolerance = CLOSE if data_type == "FP32" else {"rtol": 3e-2, "atol": 3e-2}
    for step in range(3):
        batch = draw_batch(blocks, (2, 3), is_weighted=True, seed=step)
        gradient = gradient_for(loops, batch, step)
        sums, saved = lookup.forward(batch.as_bags(device), training=True)
        torch.testing.assert_close(sums.reshape(-1).double().cpu(), loops.sums(batch), **tolerance)
        if lookup.parameters():
            continue
        lookup.backward(saved, gradient.to(device))
        loops.update(batch, gradient, 0.1)
        for index, expected in enumerate(loops.weights):
            torch.testing.assert_close(lookup.weight(index).double().cpu(), expected, **tolerance)
