"""What every compute kernel must keep.

Legend: S slots, N ids, D columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.optim.fused import spec_to_torch
from shardwright.planning.optimizers import OptimizerSpec
from shardwright.planning.tables import DataType
from shardwright.runtime.learning_rates import LearningRates
from shardwright.runtime.lookup import Bags, BlockSpec, Lookup
from shardwright.testing.guesses import sums_look_like, updates_look_like
from shardwright.testing.keys import RowsOfKeys, keys_of
from shardwright.testing.loops import (
    OPTIMIZERS,
    Batch,
    Loops,
    block_spec,
    build,
    draw_batch,
    draw_sequences,
)
from shardwright.testing.memory import held_bytes

SOURCES = ((3,), (2, 3), (4, 0, 1), (0, 0), (0,))
"""Batch sizes of the ranks whose bags a lookup gets."""

MEMORY_TOLERANCE = 0.03
"""What the planner promises: memory as declared, within 3 %."""

_CLOSE: Mapping[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
_ROUNDED_STEPS = 4
"""How often weights of halves are rounded to their type before they are compared."""

_STATES = {"sgd": (), "adam": ("exp_avg", "exp_avg_sq")}
_HALVES = ("FP16", "BF16")


class ComputeKernelTests:
    """The tests of a compute kernel: give the fixture ``compute_kernel``, an instance.

    They run on the CPU, or where the kernel refuses that, on the accelerator if there is one. What the kernel says it
    does not support is left out. A kernel that takes any id is asked for rows by 64-bit keys, all of which get one.

    Attributes:
        extras: what the plan says of each block, to be set in the subclass where the kernel's lookups need it.
    """

    extras: ClassVar[Mapping[str, Any]] = {}

    def test_declarations_can_be_planned_with(self, compute_kernel: ComputeKernel) -> None:
        """Every request gets an answer, and of what is supported the numbers make sense."""
        for request in _requests():
            answer = compute_kernel.supports(request)
            assert answer is True or (isinstance(answer, str) and answer), (
                f"{compute_kernel.name}: supports() must be True or the reason why not, it is {answer!r}"
            )
            if answer is True:
                _check_declared(compute_kernel, request)

    def test_supports_some_training(self, compute_kernel: ComputeKernel) -> None:
        """Some optimizer on some device: else no other test here would test anything."""
        answers = [compute_kernel.supports(attrs.evolve(request, here=False)) for request in _requests()]
        assert True in answers, f"{compute_kernel.name}: supports nothing: {sorted(set(map(str, answers)))}"

    def test_what_is_supported_is_built_and_looked_up(self, compute_kernel: ComputeKernel) -> None:
        """Of each data type, pooling and cut of columns that the kernel says it supports."""
        device = _device(compute_kernel)
        for data_type, pooling, columns in product(DataType, ("SUM", "NONE"), ((0, 8), (2, 5))):
            block = block_spec(
                5,
                8,
                columns=columns,
                optimizer=_any_optimizer(compute_kernel),
                data_type=data_type.value,
                device=device.type,
                pooling=pooling,
                **self._kind_of_ids(compute_kernel),
            )
            if compute_kernel.supports(block.request) is True:
                what = f"{compute_kernel.name}: {data_type.value}, pooling {pooling}, columns {columns}"
                lookup, loops = _built(what, compute_kernel, [block], device)
                batch = _draw([block], (2, 3), pooling=pooling, is_weighted=False)
                _check_sums(what, lookup, loops, batch, device)

    @pytest.mark.parametrize("is_weighted", [False, True])
    def test_forward_sums_the_rows_of_each_bag(
        self, compute_kernel: ComputeKernel, is_weighted: bool
    ) -> None:
        """Bags are empty, ids repeat, ranks have batches of different sizes or none; kernels always sum."""
        for blocks, device in self._groups(compute_kernel, _any_optimizer(compute_kernel)):
            lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
            for sources in SOURCES:
                what = f"{compute_kernel.name}: sums of batches of {sources}"
                batch = _draw(blocks, sources, is_weighted=is_weighted)
                for training in (True, False):
                    _check_sums(what, lookup, loops, batch, device, training=training)

    @pytest.mark.parametrize("data_type", _HALVES)
    def test_forward_of_halves_sums_in_float32(self, compute_kernel: ComputeKernel, data_type: str) -> None:
        """Bags of many rows lose nothing to the weights' own type."""
        for blocks, device in self._groups(
            compute_kernel, _any_optimizer(compute_kernel), data_type=data_type
        ):
            lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
            batch = _draw(blocks, (3, 2), is_weighted=True, max_length=40)
            _check_sums(f"{compute_kernel.name}: sums of {data_type} rows", lookup, loops, batch, device)

    def test_forward_of_sequences_is_the_ids_rows_in_their_order(self, compute_kernel: ComputeKernel) -> None:
        """Of any number of ranks and ids."""
        for blocks, device in self._groups(compute_kernel, _any_optimizer(compute_kernel), pooling="NONE"):
            lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
            for num_sources, max_ids in product((1, 2, 3), (0, 6)):
                batch = draw_sequences(blocks, num_sources, max_ids=max_ids)
                _check_sums(f"{compute_kernel.name}: rows of sequences", lookup, loops, batch, device)

    @pytest.mark.parametrize("pooling", ["SUM", "NONE"])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_backward_updates_rows_or_shows_their_gradients(
        self, compute_kernel: ComputeKernel, optimizer: str, pooling: str
    ) -> None:
        """By each optimizer that the kernel declares; rows that nobody looks up are left alone."""
        for blocks, device in self._groups(compute_kernel, OptimizerSpec(optimizer, 0.1), pooling=pooling):
            for sources, is_weighted in product(SOURCES[1:4], {False, pooling == "SUM"}):
                lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
                for step in range(3):
                    batch = _draw(blocks, sources, pooling=pooling, is_weighted=is_weighted, seed=step)
                    what = f"{compute_kernel.name}: {optimizer}, step {step} of batches of {sources}"
                    _train(what, lookup, loops, batch, device, seed=step)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_backward_uses_the_optimizers_parameters(
        self, compute_kernel: ComputeKernel, optimizer: str
    ) -> None:
        """Other values than the usual ones."""
        parameters = {"sgd": {}, "adam": {"eps": 0.1, "beta1": 0.5, "beta2": 0.8}}.get(
            optimizer, {"eps": 0.3}
        )
        for blocks, device in self._groups(compute_kernel, OptimizerSpec(optimizer, 0.1, parameters)):
            lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
            for step in range(3):
                batch = _draw(blocks, (2, 3), is_weighted=True, seed=step)
                _train(f"{compute_kernel.name}: {optimizer} with {parameters}", lookup, loops, batch, device)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_learning_rate_holds_from_the_next_forward_pass(
        self, compute_kernel: ComputeKernel, optimizer: str
    ) -> None:
        """Where the optimizer is fused."""
        for blocks, device in self._fused_groups(compute_kernel, optimizer):
            lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
            for step, rate in enumerate((0.1, 0.7, 0.0, 0.01)):
                lookup.set_learning_rate(rate)
                batch = _draw(blocks, (2, 3), is_weighted=True, seed=step)
                what = f"{compute_kernel.name}: {optimizer} after set_learning_rate({rate})"
                _train(what, lookup, loops, batch, device, rate=rate)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_step_keeps_the_learning_rate_of_its_forward_pass(
        self, compute_kernel: ComputeKernel, optimizer: str
    ) -> None:
        """Whatever was set since, and whichever forward pass came later: as the engine calls it."""
        for blocks, device in self._fused_groups(compute_kernel, optimizer):
            lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
            rates, begun = LearningRates([lookup]), []
            for step, rate in enumerate((0.1, 0.7)):
                rates.set({blocks[0].request.optimizer: rate}.get)
                batch = _draw(blocks, (2, 3), is_weighted=True, seed=step)
                saved = lookup.forward(batch.as_bags(device), training=True)[1]
                begun.append((batch, saved, rates.now, rate))
            rates.set({blocks[0].request.optimizer: 0.01}.get)
            for batch, saved, of_forward, rate in begun:
                what = f"{compute_kernel.name}: {optimizer}, forward pass at the learning rate {rate}, then others"
                with rates.held(of_forward):
                    _go_back(what, lookup, loops, batch, saved, device, rate=rate)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_optimizer_state_is_of_the_rows_and_continues_in_another_lookup(
        self, compute_kernel: ComputeKernel, optimizer: str
    ) -> None:
        """What a checkpoint keeps is all there is."""
        for blocks, device in self._fused_groups(compute_kernel, optimizer):
            lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
            for step in range(3):
                batch = _draw(blocks, (2, 3), is_weighted=True, seed=step)
                _train(compute_kernel.name, lookup, loops, batch, device, seed=step)
            fresh, _ = build(compute_kernel, blocks, seed=9, device=device)
            for index in range(len(blocks)):
                _check_state(f"{compute_kernel.name}: {optimizer}", lookup, loops, index, optimizer, step=3)
                _copy_state(compute_kernel.name, lookup, fresh, loops, index)
            fresh.load_step(3)
            batch = _draw(blocks, (2, 3), is_weighted=True, seed=7)
            what = f"{compute_kernel.name}: {optimizer} in a lookup that took over weights and state"
            _train(what, fresh, loops, batch, device)

    def test_row_wise_optimizer_is_exact_on_cut_columns(self, compute_kernel: ComputeKernel) -> None:
        """Where the kernel takes it, it sees the gradient of whole rows."""
        device = _device(compute_kernel)
        blocks = [
            block_spec(
                rows,
                12,
                columns=(4, 8),
                slots=slots,
                optimizer=OptimizerSpec("row_wise_adagrad", 0.1),
                device=device.type,
                **self._kind_of_ids(compute_kernel),
            )
            for rows, slots in ((5, 2), (3, 1))
        ]
        if not compute_kernel.fuses_optimizer or not _takes(compute_kernel, blocks):
            pytest.skip(
                f"{compute_kernel.name} says it does not support this, or leaves the optimizer to the user"
            )
        assert compute_kernel.needs_whole_rows(blocks[0].request), (
            f"{compute_kernel.name}: supports row_wise_adagrad on 4 of 12 columns, but does not ask for whole rows"
        )
        lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
        for step in range(3):
            batch = _draw(blocks, (2, 3), is_weighted=True, seed=step)
            _train(f"{compute_kernel.name}: row_wise_adagrad, cut columns", lookup, loops, batch, device)

    def test_prepare_serves_backward_as_forward_does(self, compute_kernel: ComputeKernel) -> None:
        """Where nobody asks for the sums."""
        for blocks, device in self._groups(compute_kernel, _any_optimizer(compute_kernel)):
            (looked_up, loops), (prepared, _) = (
                build(compute_kernel, blocks, device=device) for _ in range(2)
            )
            batch = _draw(blocks, (2, 3), is_weighted=True)
            gradient = _gradient(loops, batch, 1).to(device)
            _, saved = looked_up.forward(batch.as_bags(device), training=True)
            shown = looked_up.backward(saved, gradient.clone())
            again = prepared.backward(prepared.prepare(batch.as_bags(device)), gradient.clone())
            for one, other in zip([*shown, *_weights(looked_up)], [*again, *_weights(prepared)], strict=True):
                assert one is not None
                assert other is not None
                _close(f"{compute_kernel.name}: after prepare()", other, one)

    def test_forwards_before_their_backwards_keep_apart(self, compute_kernel: ComputeKernel) -> None:
        """A pipeline looks the next batch up before it goes back through this one."""
        for blocks, device in self._groups(compute_kernel, _any_optimizer(compute_kernel)):
            lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
            batches = [_draw(blocks, (3,), is_weighted=True, seed=seed) for seed in (1, 2)]
            saved = [lookup.forward(batch.as_bags(device), training=True)[1] for batch in batches]
            for batch, kept in reversed(list(zip(batches, saved, strict=True))):
                what = f"{compute_kernel.name}: two forward passes before their backward passes"
                _go_back(what, lookup, loops, batch, kept, device)

    def test_weights_share_storage_with_what_is_looked_up(self, compute_kernel: ComputeKernel) -> None:
        """What a checkpoint loads into ``weight`` is what lookups read."""
        for blocks, device in self._groups(compute_kernel, _any_optimizer(compute_kernel)):
            lookup, _ = build(compute_kernel, blocks, device=device)
            for index, spec in enumerate(blocks):
                weight, shape = lookup.weight(index), (spec.block.num_rows, spec.block.num_columns)
                assert tuple(weight.shape) == shape, (
                    f"{compute_kernel.name}: weight({index}) is {weight.shape}"
                )
                assert not weight.requires_grad, f"{compute_kernel.name}: weight({index}) requires a gradient"
                weight.fill_(index + 1)
            batch = Batch([[[[(0, 1.0)]] for spec in blocks for _ in range(spec.num_slots)]], False)
            sums, _ = lookup.forward(batch.as_bags(device), training=False)
            wanted = {float(index + 1) for index in range(len(blocks))}
            assert set(sums.reshape(-1).tolist()) == wanted, (
                f"{compute_kernel.name}: what was written into weight() is lost: lookups give "
                f"{sorted(set(sums.reshape(-1).tolist()))[:4]}, not {sorted(wanted)}. Give the storage, not a copy"
            )
            for index, parameter in enumerate(lookup.parameters()):
                assert (parameter == index + 1).all(), f"{compute_kernel.name}: parameter {index} is a copy"

    def test_forward_runs_in_inference_mode(self, compute_kernel: ComputeKernel) -> None:
        """And gives the same."""
        for blocks, device in self._groups(compute_kernel, _any_optimizer(compute_kernel)):
            lookup, loops = _built(compute_kernel.name, compute_kernel, blocks, device)
            with torch.inference_mode():
                batch = _draw(blocks, (3,), is_weighted=True)
                _check_sums(f"{compute_kernel.name}: inference", lookup, loops, batch, device)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_declared_memory_is_what_is_allocated(
        self, compute_kernel: ComputeKernel, optimizer: str
    ) -> None:
        """Weights, optimizer state and dense gradients after a step, within 3 %; kernels on the CPU."""
        for data_type, columns in product(("FP32", *_HALVES), ((0, 64), (16, 48))):
            blocks = [
                block_spec(
                    rows,
                    64,
                    slots=slots,
                    columns=columns,
                    optimizer=OptimizerSpec(optimizer, 0.1),
                    data_type=data_type,
                    **self._kind_of_ids(compute_kernel),
                )
                for rows, slots in ((3000, 1), (1000, 2))
            ]
            if _takes(compute_kernel, blocks):
                _check_memory(f"{compute_kernel.name}: {optimizer}, {data_type}", compute_kernel, blocks)

    def test_key_without_a_row_brings_zeros_and_gets_none_without_training(
        self, compute_kernel: ComputeKernel
    ) -> None:
        """What is looked up to be served, and was never trained, changes nothing."""
        if not compute_kernel.takes_any_id:
            pytest.skip(f"{compute_kernel.name} takes rows, and no keys")
        for blocks, device in self._groups(compute_kernel, _any_optimizer(compute_kernel)):
            lookup = compute_kernel.build(blocks, device=device)
            what = f"{compute_kernel.name}: keys that were never trained"
            _check_unborn(what, lookup, blocks, list(compute_kernel.row_state))

    def _kind_of_ids(self, kernel: ComputeKernel) -> dict[str, Any]:
        return {"takes_any_id": kernel.takes_any_id, "extras": self.extras}

    def _groups(
        self, kernel: ComputeKernel, optimizer: OptimizerSpec, **others: str
    ) -> list[tuple[list[BlockSpec], torch.device]]:
        return _groups(kernel, optimizer, extras=self.extras, **others)

    def _fused_groups(
        self, kernel: ComputeKernel, optimizer: str
    ) -> list[tuple[list[BlockSpec], torch.device]]:
        if not kernel.fuses_optimizer:
            pytest.skip(f"{kernel.name} leaves the optimizer to the user")
        return self._groups(kernel, OptimizerSpec(optimizer, 0.1))


def _check_unborn(what: str, lookup: Lookup, blocks: Sequence[BlockSpec], names: Sequence[str]) -> None:
    keys = keys_of(sum(spec.num_slots for spec in blocks), first=1000)
    bags = Bags(ids=keys, lengths=None, weights=None, counts=((1,) * len(keys),))
    before = [lookup.row_state(index) for index in range(len(blocks))]
    _check_row_state(what, before, blocks, names)
    copies = [{name: value.clone() for name, value in state.items()} for state in before]
    sums, _ = lookup.forward(bags, training=False)
    assert not sums.any(), f"{what}: bring {sums[:4].tolist()}, they must bring zeros"
    for index, state in enumerate(copies):
        for name, value in lookup.row_state(index).items():
            assert torch.equal(value, state[name]), f"{what}: a lookup without training changed {name}"


def _check_row_state(
    what: str, states: Sequence[Mapping[str, Tensor]], blocks: Sequence[BlockSpec], names: Sequence[str]
) -> None:
    for spec, state in zip(blocks, states, strict=True):
        assert list(state) == list(names), (
            f"{what}: row_state() of a lookup has {list(state)}, the kernel's row_state says {list(names)}"
        )
        for name, value in state.items():
            form = (value.dtype, list(value.shape))
            assert form == (torch.int64, [spec.block.num_rows, 1]), (
                f"{what}: {name} is {form[0]} {form[1]}, it must be int64 [{spec.block.num_rows}, 1]"
            )


def _requests() -> list[KernelRequest]:
    """What planners may ask: devices, data types, widths, optimizers, poolings."""
    optimizers = [None, *(OptimizerSpec(name) for name in (*OPTIMIZERS, "no_such_optimizer"))]
    return [
        KernelRequest(device, data_type, 16, columns, is_pooled=pooled, optimizer=optimizer, here=here)
        for device, data_type, columns, pooled, optimizer, here in product(
            ("cpu", "cuda", "no_such_device"), DataType, (16, 7), (True, False), optimizers, (True, False)
        )
    ]


def _check_declared(kernel: ComputeKernel, request: KernelRequest) -> None:
    fraction, reads = kernel.bandwidth_fraction(request), kernel.reads(request)
    assert 0 < fraction <= 1, f"{kernel.name}: bandwidth_fraction is {fraction}, not above 0 and up to 1"
    assert sum(reads.values()) == pytest.approx(1), (
        f"{kernel.name}: the parts of reads() {reads} are not 1 together"
    )
    few, many = (kernel.memory_bytes(request, rows) for rows in (10, 1000))
    for tier, size in many.items():
        assert tier in ("device", "host"), (
            f"{kernel.name}: memory_bytes() has the tier {tier!r}, not device or host"
        )
        assert 0 <= few.get(tier, 0) <= size, (
            f"{kernel.name}: 1000 rows take {size} bytes of {tier} memory, 10 rows take {few.get(tier, 0)}"
        )
    key = kernel.group_key(request)
    assert hash(key) == hash(kernel.group_key(request)), (
        f"{kernel.name}: group_key() differs when asked again"
    )
    for what, other in (
        ("data types", {"data_type": _other_type(request)}),
        ("optimizers", _other_rate(request)),
    ):
        changed = attrs.evolve(request, **other)
        if other and kernel.fuses_optimizer and kernel.supports(changed) is True:
            assert key != kernel.group_key(changed), (
                f"{kernel.name}: group_key() puts different {what} together"
            )


def _other_type(request: KernelRequest) -> DataType:
    return DataType.FP16 if request.data_type is DataType.FP32 else DataType.FP32


def _other_rate(request: KernelRequest) -> dict[str, Any]:
    if request.optimizer is None:
        return {}
    return {"optimizer": attrs.evolve(request.optimizer, learning_rate=0.5)}


def _device(kernel: ComputeKernel) -> torch.device:
    """Where the kernel is tested: on the CPU if it can, else on the accelerator that is here."""
    reasons = []
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    for device in filter(None, ("cpu", accelerator.type if accelerator else "")):
        requests = [request for request in _requests() if request.device == device and request.here]
        answers = {kernel.supports(request) for request in requests}
        if True in answers:
            return torch.device(device)
        reasons += sorted(map(str, answers))[:1]
    pytest.skip(f"{kernel.name} does not run on this machine: {'; '.join(reasons)}")


def _any_optimizer(kernel: ComputeKernel) -> OptimizerSpec:
    """The first of those that the loops know that the kernel takes with some type of weights."""
    taken = {
        request.optimizer.name
        for request in _requests()
        if request.optimizer and request.here and kernel.supports(request) is True
    }
    return OptimizerSpec(next((name for name in OPTIMIZERS if name in taken), OPTIMIZERS[0]), 0.1)


def _takes(kernel: ComputeKernel, blocks: Sequence[BlockSpec]) -> bool:
    return all(kernel.supports(spec.request) is True for spec in blocks)


def _groups(
    kernel: ComputeKernel,
    optimizer: OptimizerSpec,
    *,
    data_type: str = "",
    pooling: str = "SUM",
    extras: Mapping[str, Any],
) -> list[tuple[list[BlockSpec], torch.device]]:
    """Blocks of several sizes, widths and numbers of features, in the groups that the kernel asks for.

    They are of the type that is asked for, or of the first that the kernel takes.
    """
    device = _device(kernel)
    common: dict[str, Any] = {
        "optimizer": optimizer,
        "pooling": pooling,
        "device": device.type,
        "extras": extras,
    }
    for name in [data_type] if data_type else ["FP32", *_HALVES]:
        blocks = [
            block_spec(rows, dim, slots=slots, data_type=name, takes_any_id=kernel.takes_any_id, **common)
            for rows, dim, slots in ((5, 8, 2), (1, 8, 1), (3, 4, 1), (4, 8, 1))
        ]
        if _takes(kernel, blocks):
            break
    else:
        what = f"{data_type} tables" if data_type else "tables of any float type"
        pytest.skip(f"{kernel.name} says it does not support {optimizer} on {what}")
    groups: dict[object, list[BlockSpec]] = {}
    for spec in blocks:
        groups.setdefault(kernel.group_key(spec.request), []).append(spec)
    return [(group, device) for group in groups.values()]


def _built(
    what: str, kernel: ComputeKernel, blocks: Sequence[BlockSpec], device: torch.device
) -> tuple[Lookup, Loops]:
    try:
        return build(kernel, blocks, device=device)
    except Exception as error:
        raise AssertionError(f"{what}: is supported, but build() raised {error!r}") from error


def _draw(
    blocks: Sequence[BlockSpec],
    sources: Sequence[int],
    *,
    is_weighted: bool,
    pooling: str = "SUM",
    seed: int = 0,
    max_length: int = 4,
) -> Batch:
    if pooling == "NONE":
        return draw_sequences(blocks, max(1, len(sources)), seed=seed, max_ids=max(sources) + 1)
    drawn = draw_batch(blocks, sources, is_weighted=is_weighted, seed=seed, max_length=max_length)
    # Weights that cancel leave gradients of rounding errors only, which optimizers that divide by them blow up.
    if not is_weighted:
        return drawn
    return drawn.changed(lambda bag: [(row, weight + 2) for row, weight in bag])


def _gradient(loops: Loops, batch: Batch, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(loops.size(batch, of_gradients=True), generator=generator) - 0.5


def _close(what: str, actual: Tensor, expected: Tensor, *, hint: Callable[[], str] = str) -> None:
    rounding = torch.finfo(actual.dtype).eps * _ROUNDED_STEPS
    close = _CLOSE if actual.dtype.itemsize > 2 else {"rtol": rounding, "atol": rounding}
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape, (
        f"{what}: the shape is {list(actual.shape)}, not {list(expected.shape)}"
    )
    torch.testing.assert_close(actual, expected, **close, msg=lambda text: f"{what}: {hint()}{text}")


def _check_sums(
    what: str, lookup: Lookup, loops: Loops, batch: Batch, device: torch.device, *, training: bool = False
) -> None:
    sums, _ = lookup.forward(batch.as_bags(device), training=training)
    assert sums.dtype == torch.float32, f"{what}: forward() gives {sums.dtype}, not float32"
    assert not sums.requires_grad, (
        f"{what}: forward() gives a tensor that requires a gradient; autograd is core's"
    )
    expected = loops.sums(batch)
    _close(what, sums.reshape(-1), expected, hint=lambda: sums_look_like(sums.reshape(-1), loops, batch))


def _train(
    what: str,
    lookup: Lookup,
    loops: Loops,
    batch: Batch,
    device: torch.device,
    *,
    seed: int = 0,
    rate: float = 0.1,
) -> None:
    _, saved = lookup.forward(batch.as_bags(device), training=True)
    _go_back(what, lookup, loops, batch, saved, device, seed=seed, rate=rate)


def _go_back(
    what: str,
    lookup: Lookup,
    loops: Loops,
    batch: Batch,
    saved: Any,
    device: torch.device,
    *,
    seed: int = 5,
    rate: float = 0.1,
) -> None:
    """Go back through a batch, and compare gradients, or weights after the update."""
    gradient = _gradient(loops, batch, seed)
    shown = lookup.backward(saved, gradient.to(device))
    parameters = lookup.parameters()
    assert len(shown) == len(parameters), (
        f"{what}: backward() gives {len(shown)} gradients for {len(parameters)} parameters"
    )
    if parameters:
        for index, (actual, expected) in enumerate(
            zip(shown, _dense_gradients(loops, batch, gradient), strict=True)
        ):
            assert actual is not None, f"{what}: backward() gives no gradient of parameter {index}"
            _close(f"{what}: gradient of block {index}", actual, expected)
        return
    before = loops.copied()
    loops.update(batch, gradient, rate)
    for index, expected in enumerate(loops.weights):
        actual = lookup.weight(index)
        hint = partial(updates_look_like, actual, index, before, batch, gradient, rate)
        _close(f"{what}: weights of block {index} after the update", actual, expected, hint=hint)


def _dense_gradients(loops: Loops, batch: Batch, gradient: Tensor) -> list[Tensor]:
    expected = [torch.zeros_like(weight) for weight in loops.weights]
    for (block, row), value in loops.row_gradients(batch, gradient).items():
        expected[block][row] = value
    return expected


def _weights(lookup: Lookup) -> list[Tensor]:
    return [lookup.weight(index) for index in range(len(lookup.blocks))]


def _check_state(what: str, lookup: Lookup, loops: Loops, index: int, optimizer: str, *, step: int) -> None:
    """The state has torch's names and one value a row or column, of what was looked up."""
    names, state, spec = _STATES.get(optimizer, ("sum",)), lookup.optimizer_state(index), loops.blocks[index]
    wanted = {"step", *names} if names else set()
    assert set(state) == wanted, f"{what}: the optimizer state has {sorted(state)}, not {sorted(wanted)}"
    if names:
        assert float(state["step"]) == step, f"{what}: step is {float(state['step'])} after {step} updates"
    for number, name in enumerate(names):
        columns = 1 if name in lookup.states_per_row else spec.block.num_columns
        rows = [
            loops.state.get((index, row), [torch.zeros(columns, dtype=torch.float64)] * 2)[number].reshape(-1)
            for row in range(spec.block.num_rows)
        ]
        expected = torch.stack([row.expand(columns) if len(row) == 1 else row[:columns] for row in rows])
        _close(f"{what}: {name} of block {index}", state[name], expected)


def _copy_state(what: str, lookup: Lookup, fresh: Lookup, loops: Loops, index: int) -> None:
    """As a checkpoint is loaded: first which row is whose, then weights and optimizer state."""
    source = torch.arange(len(lookup.weight(index)))
    if isinstance(lookup, RowsOfKeys) and isinstance(fresh, RowsOfKeys):
        source = fresh.take_over(lookup, index, what)
        loops.reorder(index, source)
    for name, value in lookup.optimizer_state(index).items():
        if name != "step":
            fresh.optimizer_state(index)[name].copy_(value[source])
    fresh.weight(index).copy_(lookup.weight(index)[source])


def _check_memory(what: str, kernel: ComputeKernel, blocks: Sequence[BlockSpec]) -> None:
    lookup, loops = build(kernel, blocks)
    batch = draw_batch(blocks, (2,), is_weighted=False)
    _, saved = lookup.forward(batch.as_bags(), training=True)
    gradients = lookup.backward(saved, torch.ones(loops.size(batch, of_gradients=True)))
    held: list[Any] = [lookup.lookup if isinstance(lookup, RowsOfKeys) else lookup]
    if lookup.parameters():
        held.append(_step_of_user(blocks[0], lookup, gradients))
    del saved, gradients
    declared = [kernel.memory_bytes(spec.request, spec.block.num_rows) for spec in blocks]
    said, allocated = sum(sum(tiers.values()) for tiers in declared), held_bytes(*held)
    assert abs(said - allocated) <= MEMORY_TOLERANCE * allocated, (
        f"{what}: memory_bytes() declares {said} bytes for 4000 rows, {allocated} are allocated "
        f"({said / max(allocated, 1):.2f} of it is declared)"
    )


def _step_of_user(block: BlockSpec, lookup: Lookup, gradients: Sequence[Tensor | None]) -> Any:
    """What the user's own optimizer keeps after a step."""
    for parameter, gradient in zip(lookup.parameters(), gradients, strict=True):
        parameter.grad = gradient
    assert block.request.optimizer is not None
    optimizer = spec_to_torch(block.request.optimizer, lookup.parameters())
    optimizer.step()
    return optimizer.state
