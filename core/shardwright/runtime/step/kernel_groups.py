"""Kernel groups: the blocks that one kernel looks up together.

Legend: W ranks, B_w batch size of rank w.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import field, frozen

from shardwright.contracts.codec import Codec
from shardwright.contracts.compute_kernel import NO_COLUMNS, WEIGHTS, ComputeKernel
from shardwright.contracts.kernel_request import KernelRequest
from shardwright.contracts.lookup import BlockSpec, Lookup
from shardwright.errors import PlanError, UnsupportedError
from shardwright.host.plugin_host import host
from shardwright.planning.arrays import Ints
from shardwright.planning.layouts.row_maps import RowMap
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec


class Bucketing(IntEnum):
    """The selection of a feature's ids for a slot. A rank's slots are sent in the order of these numbers."""

    WHOLE = 0  # all ids, as they are
    CUT = 1  # the ids of a row part, with a bag for each sample
    RAGGED = 2  # the ids of a row part, without bags that have none


@frozen
class GroupKind:
    """Properties shared by all blocks of a kernel group, on all ranks.

    Args:
        bucketing: selection of ids for the group's slots.
        path: key of the return path that its results take.
        kernel_name: name of its compute kernel.
        key: the kernel's own group key; blocks with different keys are not looked up together.
        is_matrix: results for a source rank are ``[B_w, columns of all slots]``; else rows of one width by slot.
        widths: columns of a slot's result, and of its gradient; ``None`` if slots differ.
        codecs: codec of results, and of gradients; ``None`` where they travel as float32.
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
        """True if each of its slots has its own number of bags."""
        return self.bucketing is Bucketing.RAGGED


@frozen(eq=False)
class KernelGroup:
    """The blocks that one kernel looks up together on this rank.

    Args:
        kind: properties shared by the blocks.
        kernel: compute kernel that looks them up.
        blocks: the blocks, in the order of their slots.
        slots: numbers of their slots among this rank's.
    """

    kind: GroupKind
    kernel: ComputeKernel = field(repr=False)
    blocks: tuple[BlockSpec, ...]
    slots: range

    @property
    def kernel_name(self) -> str:
        """Name of the compute kernel."""
        return self.kind.kernel_name


def rows_of_parts(row_map: RowMap) -> Ints:
    """Number of rows of each row part, ``[num_parts]``."""
    sizes = np.array(list(row_map.part_sizes()), dtype=np.int64).reshape(-1, 2)
    return np.repeat(sizes[:, 0], sizes[:, 1])


def check_layout(table: TableSpec, sharding: ParameterSharding, world_size: int) -> None:
    """Check that a plan's layout covers the table, on ranks that exist.

    Raises:
        PlanError: it does not; the text names the table and its sharding type.
    """
    try:
        sharding.layout.check(table, world_size=world_size)
    except ValueError as error:
        raise PlanError(f"the plan of table {table.path!r} ({sharding.sharding_type}): {error}") from error


LookupBuilder: TypeAlias = Callable[[KernelGroup, Any], Lookup]
"""A function that makes the lookup of a kernel group on a device."""


def build_lookup(group: KernelGroup, device: Any) -> Lookup:
    """Build a group's lookup by its kernel.

    Raises:
        UnsupportedError: a kernel built something that is no :class:`Lookup`.
    """
    lookup: object = group.kernel.build(group.blocks, device=device)
    if not isinstance(lookup, Lookup):
        tables = ", ".join(repr(spec.table.name) for spec in group.blocks)
        raise UnsupportedError(
            f"compute kernel {group.kernel.name!r} broke its contract: build() for the tables {tables} returned a "
            f"{type(lookup).__name__}; it must return a shardwright.Lookup"
        )
    return lookup


def kernel_of(name: str) -> ComputeKernel:
    """Make an object of the registered compute kernel called ``name``."""
    return host().compute_kernels.create(name)


_DTYPES = {"int64": torch.int64, "float32": torch.float32}
"""The dtypes that columns beside ids may have."""


def columns_of(
    tables: Sequence[TableSpec], shardings: Mapping[str, ParameterSharding], device: torch.device
) -> dict[str, torch.dtype]:
    """The dtype of each column that the kernels of some tables ask for beside ids and weights, in order of their names.

    Raises:
        UnsupportedError: two ask for one name with different dtypes, or one for a dtype that does not travel.
    """
    found: dict[str, str] = {}
    for table in tables:
        sharding = shardings[table.name]
        request = KernelRequest.of(
            table, table.embedding_dim, device=device.type, extras=sharding.layout.extras
        )
        for name, dtype in kernel_of(sharding.compute_kernel).columns(request).items():
            if (
                dtype not in _DTYPES
                or found.setdefault(name, dtype) != dtype
                or name in (WEIGHTS, *NO_COLUMNS)
            ):
                raise UnsupportedError(
                    f"table {table.describe()}: compute kernel {sharding.compute_kernel!r} asks for the column "
                    f"{name!r} of {dtype}. A column is int64 or float32, the same for all tables of a collection, and "
                    f"not {WEIGHTS!r}, which weighted collections have, nor one of {', '.join(map(repr, NO_COLUMNS))}.",
                    subject=table.path,
                    asked=name,
                )
    return {name: _DTYPES[found[name]] for name in sorted(found)}


def is_updated_in_backward(table: TableSpec, sharding: ParameterSharding) -> bool:
    """True if a table's kernel runs its optimizer in the backward pass; else autograd sees its gradients."""
    return (
        not table.is_frozen
        and table.optimizer is not None
        and kernel_of(sharding.compute_kernel).fuses_optimizer
    )
