"""Kernel groups: the blocks that one kernel looks up together, and what the plan and the kernels say of them.

Legend: W ranks, B_w batch size of rank w.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from attrs import field, frozen

from shardwright.contracts.codec import Codec
from shardwright.contracts.compute_kernel import ComputeKernel
from shardwright.contracts.lookup import BlockSpec, Lookup
from shardwright.errors import PlanError, UnsupportedError
from shardwright.host.plugin_host import host
from shardwright.planning.layouts.blocks import Ints
from shardwright.planning.layouts.row_maps import RowMap
from shardwright.planning.plan.plan import ParameterSharding
from shardwright.planning.tables.spec import TableSpec


class Bucketing(IntEnum):
    """How the ids of a feature become those of a slot; slots of a rank are sent in this order."""

    WHOLE = 0  # all of them, as they are
    CUT = 1  # those of a row part, with a bag for each sample
    RAGGED = 2  # those of a row part, without bags that have none


@frozen
class GroupKind:
    """What the blocks of a kernel group have in common, on all ranks.

    Args:
        bucketing: of its slots.
        path: the way its results take home.
        kernel_name: of its kernel.
        key: what the kernel says.
        is_matrix: results of a source are ``[B_w, columns of all slots]``, else slot after slot rows of one width.
        widths: columns of each slot's result and of its gradient, where they are the same for all slots.
        codecs: by what results and gradients travel; ``None`` where they travel as they are.
    """

    bucketing: Bucketing
    path: Hashable
    kernel_name: str
    key: Hashable
    is_matrix: bool
    widths: tuple[int, int] | None
    codecs: tuple[Codec | None, Codec | None]

    @property
    def is_ragged(self) -> bool:
        """Whether its slots have bags of their own number."""
        return self.bucketing is Bucketing.RAGGED


@frozen(eq=False)
class KernelGroup:
    """The blocks that one kernel looks up together on this rank.

    Args:
        kind: what they have in common.
        kernel: what looks them up.
        blocks: in the order of their slots.
        slots: their slots, among this rank's.
    """

    kind: GroupKind
    kernel: ComputeKernel = field(repr=False)
    blocks: tuple[BlockSpec, ...]
    slots: range

    @property
    def kernel_name(self) -> str:
        """The kernel's."""
        return self.kind.kernel_name


def rows_of_parts(row_map: RowMap) -> Ints:
    """The rows of each part."""
    sizes = np.array(list(row_map.part_sizes()), dtype=np.int64).reshape(-1, 2)
    return np.repeat(sizes[:, 0], sizes[:, 1])


def check_layout(table: TableSpec, sharding: ParameterSharding, world_size: int) -> None:
    """Check that a plan's layout covers the table, on ranks that exist.

    Raises:
        PlanError: naming table and sharding type.
    """
    try:
        sharding.layout.check(table, world_size=world_size)
    except ValueError as error:
        raise PlanError(f"the plan of table {table.path!r} ({sharding.sharding_type}): {error}") from error


LookupBuilder: TypeAlias = Callable[[KernelGroup, Any], Lookup]


def build_lookup(group: KernelGroup, device: Any) -> Lookup:
    """What a group's kernel builds on a device.

    Raises:
        UnsupportedError: a kernel built something else.
    """
    lookup: object = group.kernel.build(group.blocks, device=device)
    if not isinstance(lookup, Lookup):
        tables = ", ".join(repr(spec.table.name) for spec in group.blocks)
        raise UnsupportedError(
            f"compute kernel {group.kernel.name!r} broke its contract: build() for the tables {tables} returned a "
            f"{type(lookup).__name__}; it must return a shardwright.Lookup"
        )
    return lookup


_BUILDER: ContextVar[LookupBuilder] = ContextVar("what gives a kernel group its lookup", default=build_lookup)


@contextmanager
def lookups_from(builder: LookupBuilder) -> Iterator[None]:
    """While this lasts, executors get their lookups from ``builder``, whatever class they are of."""
    token = _BUILDER.set(builder)
    try:
        yield
    finally:
        _BUILDER.reset(token)


def build_lookups(groups: Sequence[KernelGroup], device: Any) -> list[Lookup]:
    """Each group's lookup: what its kernel builds on a device, unless :func:`lookups_from` says otherwise.

    Raises:
        UnsupportedError: a kernel built something else.
    """
    builder = _BUILDER.get()
    return [builder(group, device) for group in groups]


def kernel_of(name: str) -> ComputeKernel:
    """The registered compute kernel called ``name``, as an object."""
    return host().compute_kernels.create(name)


def is_updated_in_backward(table: TableSpec, sharding: ParameterSharding) -> bool:
    """Whether the kernel of a table runs its optimizer in the backward pass; else its gradients are visible."""
    return table.optimizer is not None and kernel_of(sharding.compute_kernel).fuses_optimizer
