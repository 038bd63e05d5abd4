"""Comparisons of a compute kernel's lookups with loops over rows, and with what the kernel declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest, KernelWork
from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.optim.fused import spec_to_torch
from shardwright.planning.tables.caching import CacheParams
from shardwright.planning.tables.data_types import DataType
from shardwright.runtime.step.backward.weight_gradients import weight_gradients
from shardwright_testing.kernels.kernel_faults import sums_look_like, updates_look_like
from shardwright_testing.kernels.keys import RowsOfKeys, keys_of
from shardwright_testing.kernels.loops import Batch, Loops, build, draw_batch
from shardwright_testing.kernels.memory import held_bytes

MEMORY_TOLERANCE = 0.03
"""Promise of the planner: memory as declared, within 3 %."""

_CLOSE: Mapping[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
_ROUNDED_STEPS = 4
"""Number of roundings of half-precision weights to their type before they are compared."""


def check_declared(kernel: ComputeKernel, request: KernelRequest) -> None:
    """Check that planners can use what a kernel says of a request that it supports."""
    fraction, reads = kernel.bandwidth_fraction(request), kernel.reads(request)
    assert 0 < fraction <= 1, f"{kernel.name}: bandwidth_fraction is {fraction}, not above 0 and up to 1"
    assert sum(reads.values()) == pytest.approx(1), (
        f"{kernel.name}: the parts of reads() {reads} are not 1 together"
    )
    assert min(reads.values()) >= 0, f"{kernel.name}: a part of reads() {reads} is below 0"
    check_times(kernel, request)
    for name, dtype in kernel.columns(request).items():
        assert dtype in ("int64", "float32"), (
            f"{kernel.name}: columns() asks for {name!r} of {dtype}, columns of ids are int64 or float32"
        )
    few, many = (kernel.memory_bytes(request, rows) for rows in (10, 1000))
    for tier, size in many.items():
        assert tier in ("device", "host", *kernel.further_tiers), (
            f"{kernel.name}: memory_bytes() has the tier {tier!r}, not device, host or one of its further_tiers"
        )
        assert 0 <= few.get(tier, 0) <= size, (
            f"{kernel.name}: 1000 rows take {size} bytes of {tier} memory, 10 rows take {few.get(tier, 0)}"
        )
    small, large = (
        kernel.memory_bytes(attrs.evolve(request, cache=CacheParams(part)), 10_000) for part in (0.05, 0.9)
    )
    assert (small != large) == kernel.caches_rows, (
        f"{kernel.name}: caches_rows is {kernel.caches_rows}, and with caches of 5 % and 90 % of the rows "
        f"memory_bytes() are {small} and {large}"
    )
    key = kernel.group_key(request)
    assert hash(key) == hash(kernel.group_key(request)), (
        f"{kernel.name}: group_key() differs when asked again"
    )
    for what, other in (
        ("data types", {"data_type": DataType.FP16 if request.data_type is DataType.FP32 else DataType.FP32}),
        ("optimizers", _other_rate(request)),
    ):
        changed = attrs.evolve(request, **other)
        if other and kernel.fuses_optimizer and kernel.supports(changed) is True:
            assert key != kernel.group_key(changed), (
                f"{kernel.name}: group_key() puts different {what} together"
            )


def check_times(kernel: ComputeKernel, request: KernelRequest) -> None:
    """Check the times that a kernel tells: one a block for any number of blocks, 0 or more, more for more work."""
    columns = np.outer([1.0, 0.5, 0.25, 10.0], [0.0, 100.0, 10_000.0])
    columns.flags.writeable = False  # as a planner gives them
    ids, distinct, vectors, rows = columns
    told = kernel.times_ms(request, KernelWork(ids, distinct, vectors, rows, bytes_per_ms=1e7))
    none = np.zeros(0)
    of_none = kernel.times_ms(request, KernelWork(none, none, none, none, bytes_per_ms=1e7))
    assert (told is None) == (of_none is None), (
        f"{kernel.name}: times_ms() tells {told} for 3 blocks, and {of_none} for none of the same request"
    )
    if told is None or of_none is None:
        return
    assert isinstance(told, tuple), f"{kernel.name}: times_ms() tells {told}, not a pair of arrays"
    for what, ms, nothing in zip(("lookups", "updates"), told, of_none, strict=True):
        assert (ms.shape, nothing.shape) == ((3,), (0,)), (
            f"{kernel.name}: times_ms() of {what} has the shapes {ms.shape} for 3 blocks and {nothing.shape} for none"
        )
        assert (np.isfinite(ms) & (ms >= 0)).all(), (
            f"{kernel.name}: times_ms() of {what} is {ms}, not 0 or more"
        )
        assert (np.diff(ms) >= 0).all(), f"{kernel.name}: times_ms() of {what} falls with more work: {ms}"


def _other_rate(request: KernelRequest) -> dict[str, Any]:
    if request.optimizer is None:
        return {}
    return {"optimizer": attrs.evolve(request.optimizer, learning_rate=0.5)}


def gradient_of(loops: Loops, batch: Batch, seed: int) -> Tensor:
    """Drawn gradients of a batch's sums."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(loops.size(batch, of_gradients=True), generator=generator) - 0.5


def check_close(what: str, actual: Tensor, expected: Tensor, *, hint: Callable[[], str] = str) -> None:
    """Compare up to the rounding of the tensors' type."""
    rounding = torch.finfo(actual.dtype).eps * _ROUNDED_STEPS
    close = _CLOSE if actual.dtype.itemsize > 2 else {"rtol": rounding, "atol": rounding}
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape, (
        f"{what}: the shape is {list(actual.shape)}, not {list(expected.shape)}"
    )
    torch.testing.assert_close(actual, expected, **close, msg=lambda text: f"{what}: {hint()}{text}")


def check_same_update(what: str, found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Two backward passes showed the same gradients and left the same weights."""
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        check_close(what, one, other)


def check_weight_gradients(
    what: str,
    kernel: ComputeKernel,
    lookup: Lookup,
    loops: Loops,
    batch: Batch,
    device: torch.device,
    saved: Any = None,
) -> None:
    """Gradients of ids' weights are those that loops give, by what a forward pass has saved or without it."""
    gradient = gradient_of(loops, batch, 1)
    found = weight_gradients(kernel, lookup, batch.as_bags(device), gradient.to(device), saved)
    check_close(what, found, loops.weight_gradients(batch, gradient))


def check_shared_storage(
    what: str, lookup: Lookup, blocks: Sequence[BlockSpec], device: torch.device
) -> None:
    """Lookups, and parameters, have what is written into ``weight``."""
    for index, spec in enumerate(blocks):
        weight, shape = lookup.weight(index), (spec.block.num_rows, spec.block.num_columns)
        assert tuple(weight.shape) == shape, f"{what}: weight({index}) is {weight.shape}"
        assert not weight.requires_grad, f"{what}: weight({index}) requires a gradient"
        weight.fill_(index + 1)
    batch = Batch([[[[(0, 1.0)]] for spec in blocks for _ in range(spec.num_slots)]], False)
    sums, _ = lookup.forward(batch.as_bags(device), training=False)
    wanted = {float(index + 1) for index in range(len(blocks))}
    assert set(sums.reshape(-1).tolist()) == wanted, (
        f"{what}: what was written into weight() is lost: lookups give "
        f"{sorted(set(sums.reshape(-1).tolist()))[:4]}, not {sorted(wanted)}. Give the storage, not a copy"
    )
    for index, parameter in enumerate(lookup.parameters()):
        assert (parameter == index + 1).all(), f"{what}: parameter {index} is a copy"


def check_sums(
    what: str, lookup: Lookup, loops: Loops, batch: Batch, device: torch.device, *, training: bool = False
) -> None:
    """A forward pass gives the sums that loops give."""
    sums, _ = lookup.forward(batch.as_bags(device), training=training)
    assert sums.dtype == torch.float32, f"{what}: forward() gives {sums.dtype}, not float32"
    assert not sums.requires_grad, (
        f"{what}: forward() gives a tensor that requires a gradient; autograd is core's"
    )
    expected = loops.sums(batch)
    check_close(what, sums.reshape(-1), expected, hint=lambda: sums_look_like(sums.reshape(-1), loops, batch))


def train(
    what: str,
    lookup: Lookup,
    loops: Loops,
    batch: Batch,
    device: torch.device,
    *,
    seed: int = 0,
    rate: float = 0.1,
) -> None:
    """Go forward and back through a batch, see :func:`go_back`."""
    _, saved = lookup.forward(batch.as_bags(device), training=True)
    go_back(what, lookup, loops, batch, saved, device, seed=seed, rate=rate)


def go_back(
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
    gradient = gradient_of(loops, batch, seed)
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
            check_close(f"{what}: gradient of block {index}", actual, expected)
        return
    before = loops.copied()
    loops.update(batch, gradient, rate)
    for index, expected in enumerate(loops.weights):
        actual = lookup.weight(index)
        hint = partial(updates_look_like, actual, index, before, batch, gradient, rate)
        check_close(f"{what}: weights of block {index} after the update", actual, expected, hint=hint)


def _dense_gradients(loops: Loops, batch: Batch, gradient: Tensor) -> list[Tensor]:
    expected = [torch.zeros_like(weight) for weight in loops.weights]
    for (block, row), value in loops.row_gradients(batch, gradient).items():
        expected[block][row] = value
    return expected


def weights_of(lookup: Lookup) -> list[Tensor]:
    """Collect the weights of every block."""
    return [lookup.weight(index) for index in range(len(lookup.blocks))]


def check_state(what: str, lookup: Lookup, loops: Loops, index: int) -> None:
    """The state has the names and values of the torch optimizer that does the same without sharding."""
    state, expected = lookup.optimizer_state(index), loops.optimizer_state(index)
    assert set(state) == set(expected), (
        f"{what}: the optimizer state has {sorted(state)}; without sharding it has {sorted(expected)}"
    )
    for name, value in expected.items():
        check_close(f"{what}: {name} of block {index}", torch.as_tensor(state[name]), torch.as_tensor(value))


def copy_state(what: str, lookup: Lookup, fresh: Lookup, loops: Loops, index: int) -> None:
    """Copy state as a checkpoint is loaded: first which row is whose, then weights and optimizer state."""
    source = torch.arange(len(lookup.weight(index)))
    if isinstance(lookup, RowsOfKeys) and isinstance(fresh, RowsOfKeys):
        source = fresh.take_over(lookup, index, what)
        loops.reorder(index, source)
    for name, value in lookup.optimizer_state(index).items():
        if name != "step":
            fresh.optimizer_state(index)[name].copy_(value[source])
    fresh.weight(index).copy_(lookup.weight(index)[source])


def check_memory(what: str, kernel: ComputeKernel, blocks: Sequence[BlockSpec]) -> None:
    """Check that a step allocates what the kernel declares, within :data:`MEMORY_TOLERANCE`."""
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
    """Run a step of the user's own optimizer, and return the state that it keeps."""
    for parameter, gradient in zip(lookup.parameters(), gradients, strict=True):
        parameter.grad = gradient
    assert block.request.optimizer is not None
    optimizer = spec_to_torch(block.request.optimizer, lookup.parameters())
    optimizer.step()
    return optimizer.state


def check_unborn(what: str, lookup: Lookup, blocks: Sequence[BlockSpec], names: Sequence[str]) -> None:
    """Keys without a row bring zeros, and looking them up without training changes nothing."""
    keys = keys_of(sum(spec.num_slots for spec in blocks), first=1000)
    bags = Bags(ids=keys, lengths=None, weights=None, counts=((1,) * len(keys),))
    before = [lookup.row_index(index).state() for index in range(len(blocks))]
    _check_row_state(what, before, blocks, names)
    copies = [{name: value.clone() for name, value in state.items()} for state in before]
    sums, _ = lookup.forward(bags, training=False)
    assert not sums.any(), f"{what}: bring {sums[:4].tolist()}, they must bring zeros"
    for index, state in enumerate(copies):
        for name, value in lookup.row_index(index).state().items():
            assert torch.equal(value, state[name]), f"{what}: a lookup without training changed {name}"


def _check_row_state(
    what: str, states: Sequence[Mapping[str, Tensor]], blocks: Sequence[BlockSpec], names: Sequence[str]
) -> None:
    for spec, state in zip(blocks, states, strict=True):
        assert list(state) == list(names), (
            f"{what}: state() of an index has {list(state)}, the kernel's row_state says {list(names)}"
        )
        for name, value in state.items():
            form = (value.dtype, list(value.shape))
            assert form == (torch.int64, [spec.block.num_rows, 1]), (
                f"{what}: {name} is {form[0]} {form[1]}, it must be int64 [{spec.block.num_rows}, 1]"
            )
