"""Requests to a compute kernel under test, and the blocks that it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import attrs
import pytest
import torch

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.contracts.lookup import BlockSpec, Lookup
from shardwright.planning.tables.data_types import DataType
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright_testing.kernels.loops import (
    OPTIMIZERS,
    Batch,
    Loops,
    block_spec,
    build,
    draw_batch,
    draw_sequences,
)

HALVES = ("FP16", "BF16")


def spec_of(optimizer: str | OptimizerSpec) -> OptimizerSpec:
    """An optimizer with the learning rate that the kit trains with."""
    if isinstance(optimizer, OptimizerSpec):
        return attrs.evolve(optimizer, learning_rate=0.1)
    return OptimizerSpec(optimizer, 0.1)


def with_other_parameters(optimizer: str | OptimizerSpec) -> OptimizerSpec:
    """An optimizer with other parameters than the usual ones, as far as the kit knows which it has."""
    known: Mapping[str, Mapping[str, float]] = {
        "adagrad": {"eps": 0.3},
        "row_wise_adagrad": {"eps": 0.3},
        "adam": {"eps": 0.1, "beta1": 0.5, "beta2": 0.8},
    }
    spec = spec_of(optimizer)
    return attrs.evolve(spec, parameters=known[spec.name]) if spec.name in known else spec


DATA_TYPES = ("FP32", *HALVES, "NO_SUCH_TYPE")


def possible_requests(
    named: Sequence[str | OptimizerSpec] = OPTIMIZERS, *, data_types: Sequence[str] = DATA_TYPES
) -> list[KernelRequest]:
    """List requests that planners may make: devices, data types, widths, optimizers, poolings."""
    optimizers = [None, *map(spec_of, named), OptimizerSpec("no_such_optimizer")]
    return [
        KernelRequest(
            device,
            DataType(data_type),
            16,
            columns,
            is_pooled=pooled,
            optimizer=optimizer,
            on_this_machine=on_this_machine,
        )
        for device, data_type, columns, pooled, optimizer, on_this_machine in product(
            ("cpu", "cuda", "no_such_device"), data_types, (16, 7), (True, False), optimizers, (True, False)
        )
    ]


def device_of(kernel: ComputeKernel, named: Sequence[str | OptimizerSpec] = OPTIMIZERS) -> torch.device:
    """Find the device to test the kernel on: the CPU if it can, else the accelerator that is here."""
    reasons = []
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    for device in filter(None, ("cpu", accelerator.type if accelerator else "")):
        asked = possible_requests(named)
        requests = [request for request in asked if request.device == device and request.on_this_machine]
        answers = {kernel.supports(request) for request in requests}
        if True in answers:
            return torch.device(device)
        reasons += sorted(map(str, answers))[:1]
    pytest.skip(f"{kernel.name} does not run on this machine: {'; '.join(reasons)}")


def any_optimizer(kernel: ComputeKernel, named: Sequence[str | OptimizerSpec] = OPTIMIZERS) -> OptimizerSpec:
    """The first of some optimizers that the kernel takes with some type of weights."""
    taken = {
        request.optimizer
        for request in possible_requests(named)
        if request.optimizer and request.on_this_machine and kernel.supports(request) is True
    }
    specs = [spec_of(optimizer) for optimizer in named]
    return next((spec for spec in specs if spec in taken), specs[0])


def takes(kernel: ComputeKernel, blocks: Sequence[BlockSpec]) -> bool:
    """True if the kernel says that it supports all of them."""
    return all(kernel.supports(spec.request) is True for spec in blocks)


def groups_of(
    kernel: ComputeKernel,
    optimizer: OptimizerSpec,
    named: Sequence[str | OptimizerSpec] = OPTIMIZERS,
    *,
    data_type: str = "",
    pooling: str = "SUM",
    extras: Mapping[str, Any],
) -> list[tuple[list[BlockSpec], torch.device]]:
    """Blocks of several sizes, widths and numbers of features, in the groups that the kernel asks for.

    They are of the type that is asked for, or of the first that the kernel takes.
    """
    device = device_of(kernel, named)
    common: dict[str, Any] = {
        "optimizer": optimizer,
        "pooling": pooling,
        "device": device.type,
        "extras": extras,
    }
    for name in [data_type] if data_type else ["FP32", *HALVES]:
        blocks = [
            block_spec(rows, dim, slots=slots, data_type=name, takes_any_id=bool(kernel.row_state), **common)
            for rows, dim, slots in ((5, 8, 2), (1, 8, 1), (3, 4, 1), (4, 8, 1))
        ]
        if takes(kernel, blocks):
            break
    else:
        what = f"{data_type} tables" if data_type else "tables of any float type"
        pytest.skip(f"{kernel.name} says it does not support {optimizer} on {what}")
    groups: dict[object, list[BlockSpec]] = {}
    for spec in blocks:
        groups.setdefault(kernel.group_key(spec.request), []).append(spec)
    return [(group, device) for group in groups.values()]


def built(
    what: str, kernel: ComputeKernel, blocks: Sequence[BlockSpec], device: torch.device
) -> tuple[Lookup, Loops]:
    """A lookup of some blocks, and loops that begin with the same weights."""
    try:
        return build(kernel, blocks, device=device)
    except Exception as error:
        raise AssertionError(f"{what}: is supported, but build() raised {error!r}") from error


def draw(
    blocks: Sequence[BlockSpec],
    sources: Sequence[int],
    *,
    is_weighted: bool,
    pooling: str = "SUM",
    seed: int = 0,
    max_length: int = 4,
) -> Batch:
    """Bags of each source, or sequences where nothing is pooled."""
    if pooling == "NONE":
        return draw_sequences(blocks, max(1, len(sources)), seed=seed, max_ids=max(sources) + 1)
    drawn = draw_batch(blocks, sources, is_weighted=is_weighted, seed=seed, max_length=max_length)
    # Weights that cancel leave gradients of rounding errors only, which optimizers that divide by them blow up.
    if not is_weighted:
        return drawn
    return drawn.changed(lambda bag: [(row, weight + 2) for row, weight in bag])
