"""Every way to shard every table, as columns.

An option of a table is a sharding type's layout with a compute kernel; a shard of an option is one of the
layout's blocks. Columns are NumPy arrays over ``T`` tables, ``O`` options and ``S`` shards; the options of
table ``t`` are ``first_option[t]:first_option[t + 1]``, the shards of option ``o`` are
``first_shard[o]:first_shard[o + 1]``. Tables, and options inside a table, stand in a fixed order that depends
on nothing but the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.sharding_type import ShardingType
from shardwright.planning.layouts import Layout
from shardwright.planning.tables import TableSpec

if TYPE_CHECKING:
    pass

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

FREE = -1
"""The rank, or rank inside a host, of a shard that may go to any."""

NO_GANG = -1
"""The gang of a shard that needs no other on its host."""


@frozen
class Refusal:
    """Something that was considered for a table and refused.

    Args:
        table: the table's path.
        kind: ``"sharding type"`` or ``"compute kernel"``.
        name: what was refused.
        reason: why.
    """

    table: str
    kind: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}: {self.reason}"


@frozen(eq=False)
class Options:
    """All options of all tables.

    Args:
        tables: the tables, in the order given.
        sharding_types: the sharding types in use, by code.
        compute_kernels: the compute kernels in use, by code.
        requests: ``(kernel code, request)`` pairs in use, by code: what kernels are asked.
        refusals: what was refused, and why.
        ids_per_batch: ids a rank looks up in the table a step: ``[T]``.
        bags_per_batch: vectors a rank gets back from the table a step: ``[T]``.
        first_option: ``[T + 1]``.
        table: table of each option, ``[O]``.
        sharding_type: code of its sharding type, ``[O]``.
        compute_kernel: code of its kernel, ``[O]``.
        layouts: its layout.
        cuts_rows: its rows are cut, so that pooled results are partial sums: ``[O]``.
        is_replicated: each of its shards is the whole table, and every rank has one: ``[O]``.
        sums_inside_host: its partial sums are added inside a host before they cross to others: ``[O]``.
        first_shard: ``[O + 1]``.
        option: option of each shard, ``[S]``.
        num_rows: ``[S]``.
        num_columns: ``[S]``.
        rank: the rank it must live on, or ``FREE``: ``[S]``.
        gang: shards of one number, which no other option has, must go to ranks of one host; ``NO_GANG``: no
            other shard matters. ``[S]``.
        local_rank: the rank inside its host that it must have, or ``FREE``: ``[S]``.
        request: code of what its kernel is asked, ``[S]``.
    """

    tables: tuple[TableSpec, ...]
    sharding_types: tuple[ShardingType, ...]
    compute_kernels: tuple[ComputeKernel, ...]
    requests: tuple[tuple[int, KernelRequest], ...]
    refusals: tuple[Refusal, ...]
    ids_per_batch: Floats
    bags_per_batch: Floats
    first_option: Ints
    table: Ints
    sharding_type: Ints
    compute_kernel: Ints
    layouts: tuple[Layout, ...]
    cuts_rows: Bools
    is_replicated: Bools
    sums_inside_host: Bools
    first_shard: Ints
    option: Ints
    num_rows: Ints
    num_columns: Ints
    rank: Ints
    gang: Ints
    local_rank: Ints
    request: Ints

    @property
    def num_options(self) -> int:
        """``O``."""
        return len(self.table)

    @property
    def num_shards(self) -> int:
        """``S``."""
        return len(self.option)

    @cached_property
    def shard_table(self) -> Ints:
        """Table of each shard: ``[S]``."""
        return self.table[self.option]

    @cached_property
    def element_bytes(self) -> Floats:
        """Bytes of an element of each table's weights: ``[T]``."""
        return np.array([table.data_type.bits / 8 for table in self.tables])

    @cached_property
    def is_pooled(self) -> Bools:
        """Whether bags become one vector: ``[T]``."""
        return np.array([table.pooling.value != "NONE" for table in self.tables], dtype=bool)

    @cached_property
    def is_weighted(self) -> Bools:
        """Whether ids carry weights: ``[T]``."""
        return np.array([table.is_weighted for table in self.tables], dtype=bool)

    @cached_property
    def num_row_parts(self) -> Ints:
        """Into how many parts the rows of each option are cut: ``[O]``."""
        return np.array([layout.row_map.num_parts for layout in self.layouts], dtype=np.int64)

    @cached_property
    def row_fraction(self) -> Floats:
        """The part of its table's rows that each shard holds: ``[S]``."""
        rows = np.array([table.num_embeddings for table in self.tables], dtype=np.float64)
        return self.num_rows / rows[self.shard_table]

    def of_table(self, table: int) -> range:
        """The options of a table."""
        return range(int(self.first_option[table]), int(self.first_option[table + 1]))

    def shards_of(self, option: int) -> slice:
        """The shards of an option."""
        return slice(int(self.first_shard[option]), int(self.first_shard[option + 1]))

    def type_of(self, option: int) -> ShardingType:
        """The sharding type of an option."""
        return self.sharding_types[int(self.sharding_type[option])]

    def kernel_of(self, option: int) -> ComputeKernel:
        """The compute kernel of an option."""
        return self.compute_kernels[int(self.compute_kernel[option])]


def fold_requests(options: Options) -> Mapping[tuple[int, int], Ints]:
    """The shards of each distinct (request code, number of rows): what is asked of a kernel only once.

    Returns:
        ``{(request, rows): shard indices}``.
    """
    order = np.lexsort((options.num_rows, options.request))
    request, rows = options.request[order], options.num_rows[order]
    changes = np.flatnonzero((np.diff(request) != 0) | (np.diff(rows) != 0)) + 1
    starts = [0, *changes.tolist(), len(order)] if len(order) else []
    return {(int(request[start]), int(rows[start])): order[start:stop] for start, stop in pairwise(starts)}
