"""Every way to shard every table, as columns.

An option of a table is a sharding type's layout with a compute kernel; a shard of an option is one of the
layout's blocks. What is alike stands once:

- ``T`` *distinct* tables stand for all ``A`` tables: those that no part of the planner could tell apart are one.
  ``distinct_table[a]`` is the distinct table that table ``a`` of ``all_tables`` is like.
- ``S`` *runs* of shards stand for all shards: neighbouring blocks of one size that are placed alike. Run ``s``
  is ``count[s]`` shards; a column over the runs gives one value, that of each one of its shards.

Columns are NumPy arrays over ``T`` distinct tables, ``O`` options and ``S`` runs; the options of distinct table ``t``
are ``first_option[t]:first_option[t + 1]``, the runs of option ``o`` are ``first_shard[o]:first_shard[o + 1]``.
Tables, and options inside a table, stand in a fixed order that depends on nothing but the input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.row_format import RowFormat
from shardwright.contracts.sharding_type import ShardingType
from shardwright.planning.arrays import FREE, ID_BYTES, Bools, Floats, Ints
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.tables.spec import TableSpec

TYPE, KERNEL = "sharding type", "compute kernel"
"""Kinds of what is refused."""


@frozen
class Refusal:
    """Something that was considered for a table and refused.

    Args:
        table: the table's path.
        kind: ``"sharding type"`` or ``"compute kernel"``.
        name: name of the refused sharding type or kernel.
        reason: why.
        is_asked: the table's constraints or its sharder name it.
    """

    table: str
    kind: str
    name: str
    reason: str
    is_asked: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}: {self.reason}"


@frozen(eq=False)
class Options:
    """All options of all tables.

    Args:
        tables: the distinct tables, each the first of those alike, in the order given: ``T``.
        all_tables: all tables, in the order given: ``A``.
        distinct_table: the distinct table that each is like: ``[A]``.
        sharding_types: the sharding types in use, by code.
        compute_kernels: the compute kernels in use, by code.
        requests: ``(kernel code, request)`` pairs in use, by code: what kernels are asked.
        refused: refusals for each distinct table, with reasons: ``T``.
        ids_per_batch: ids a rank looks up in the table a step: ``[T]``.
        bags_per_batch: vectors a rank gets back from the table a step: ``[T]``.
        first_option: ``[T + 1]``.
        table: distinct table of each option, ``[O]``.
        sharding_type: code of its sharding type, ``[O]``.
        compute_kernel: code of its kernel, ``[O]``.
        layouts: its layout.
        cuts_rows: its rows are cut, so that pooled results are partial sums: ``[O]``.
        is_replicated: every rank has a copy of each of its shards: ``[O]``.
        sums_inside_host: its partial sums are added inside a host before they cross to others: ``[O]``.
        first_shard: ``[O + 1]``.
        option: option of each run, ``[S]``.
        count: shards of each run, ``[S]``.
        num_rows: rows of each of its shards, ``[S]``.
        num_columns: columns of each of its shards, ``[S]``.
        is_copy: every rank has a copy of its rows: ``[S]``.
        id_fraction: the part of its table's lookups that are of the rows that each of its shards holds: ``[S]``.
        rank: the rank that its first shard must live on, the next on the next rank, and so on; or ``FREE``: ``[S]``.
        gang: the shards of runs of one number, which no other option has, must go to ranks of one host;
            ``NO_GANG``: no other shard matters. ``[S]``.
        local_rank: the rank inside the host that its first shard must have, the next the next; or ``FREE``: ``[S]``.
        request: code of what the kernel is asked for each of its shards, ``[S]``.
    """

    tables: tuple[TableSpec, ...]
    all_tables: tuple[TableSpec, ...]
    distinct_table: Ints
    sharding_types: tuple[ShardingType, ...]
    compute_kernels: tuple[ComputeKernel, ...]
    requests: tuple[tuple[int, KernelRequest], ...]
    refused: tuple[tuple[Refusal, ...], ...]
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
    count: Ints
    num_rows: Ints
    num_columns: Ints
    is_copy: Bools
    id_fraction: Floats
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
        """``S``: how many runs of equal shards there are, and values in a column over them."""
        return len(self.option)

    @cached_property
    def shard_table(self) -> Ints:
        """Distinct table of each run: ``[S]``."""
        return self.table[self.option]

    @cached_property
    def shards_per_option(self) -> Ints:
        """Number of shards of each option, those of all its runs together: ``[O]``."""
        return np.add.reduceat(self.count, self.first_shard[:-1])

    @cached_property
    def multiplicity(self) -> Ints:
        """Number of tables that each distinct table stands for: ``[T]``."""
        return np.bincount(self.distinct_table, minlength=len(self.tables)).astype(np.int64)

    @cached_property
    def refusals(self) -> tuple[Refusal, ...]:
        """Refusals of each table, with reasons."""
        return tuple(
            evolve(refusal, table=table.path)
            for table, distinct in zip(self.all_tables, self.distinct_table.tolist(), strict=True)
            for refusal in self.refused[distinct]
        )

    def matters(self, refusal: Refusal, taken: ComputeKernel) -> bool:
        """True if what was refused was asked for, or is a kernel that is preferred to the one that was taken."""
        is_kernel = refusal.kind == KERNEL
        return refusal.is_asked or (is_kernel and self._preference[refusal.name] > taken.preference)

    @cached_property
    def _preference(self) -> dict[str, int]:
        return {kernel.name: kernel.preference for kernel in self.compute_kernels}

    @cached_property
    def row_formats(self) -> tuple[RowFormat, ...]:
        """The format of each table's rows, which all kernels share that have options of it: ``T``."""
        kernels = map(self.kernel_of, self.first_option[:-1].tolist())
        found = [
            kernel.row_format(table.data_type) for kernel, table in zip(kernels, self.tables, strict=True)
        ]
        return tuple(one for one in found if one is not None)  # a kernel without it has no option

    @cached_property
    def element_bytes(self) -> Floats:
        """Bytes of an element of each table's rows: ``[T]``."""
        return np.array([rows.bits / 8 for rows in self.row_formats])

    @cached_property
    def row_bytes(self) -> Floats:
        """Bytes of a stored row of each shard: ``[S]``."""
        pairs = np.stack([self.shard_table, self.num_columns])
        distinct, inverse = np.unique(pairs, axis=1, return_inverse=True)
        values = [self.row_formats[table].row_bytes(columns) for table, columns in distinct.T.tolist()]
        return np.array(values, dtype=np.float64)[inverse.reshape(-1)]

    @cached_property
    def is_pooled(self) -> Bools:
        """True for tables whose bags become one vector: ``[T]``."""
        return np.array([table.pooling.value != "NONE" for table in self.tables], dtype=bool)

    @cached_property
    def is_weighted(self) -> Bools:
        """True for tables whose ids carry weights: ``[T]``."""
        return np.array([table.is_weighted for table in self.tables], dtype=bool)

    @cached_property
    def is_frozen(self) -> Bools:
        """True for tables that are looked up and never updated: ``[T]``."""
        return np.array([table.is_frozen for table in self.tables], dtype=bool)

    def on_device(self, device: str) -> Bools:
        """True for runs whose shards are on ranks with a type of device: ``[S]``."""
        return self.by_request(lambda _, request: request.device == device) > 0

    def by_request(self, value: Callable[[ComputeKernel, KernelRequest], float]) -> Floats:
        """Values of what kernels are asked, each computed once, for each run: ``[S]``.

        Args:
            value: function of a kernel and what it is asked for a shard.
        """
        values = [value(self.compute_kernels[code], request) for code, request in self.requests]
        return np.array(values, dtype=np.float64)[self.request]

    @cached_property
    def id_bytes(self) -> Floats:
        """Bytes of an id as it travels, with its 32-bit weight where it has one: ``[S]``.

        So do the columns that its table's kernel asks for. The collection's other ids have them too, which is in no
        price: options are priced one by one, whatever kernels other tables get.
        """
        columns = self.by_request(
            lambda kernel, request: sum(
                np.dtype(dtype).itemsize for dtype in kernel.columns(request).values()
            )
        )
        in_all: Floats = ID_BYTES + 4.0 * self.is_weighted[self.shard_table] + columns
        return in_all

    def devices_of(self, option: int) -> list[str]:
        """The type of device of each shard of an option, in the order of its blocks."""
        return [self.requests[code][1].device for code in self.spread(self.request, option).tolist()]

    @cached_property
    def row_fraction(self) -> Floats:
        """The part of its table's rows that each shard of a run holds: ``[S]``."""
        rows = np.array([table.num_embeddings for table in self.tables], dtype=np.float64)
        return self.num_rows / rows[self.shard_table]

    def spread(self, column: npt.NDArray[Any], option: int) -> npt.NDArray[Any]:
        """The values of a column over the runs for each shard of an option, in the order of its blocks.

        Args:
            column: ``[S, ...]``.
            option: the option.
        """
        runs = self.shards_of(option)
        return np.repeat(column[runs], self.count[runs], axis=0)

    def fixed_ranks(self, option: int) -> Ints:
        """The rank that each shard of an option must live on, or ``FREE``, in the order of its blocks."""
        runs = self.shards_of(option)
        pairs = zip(self.rank[runs].tolist(), self.count[runs].tolist(), strict=True)
        return np.concatenate(
            [np.full(n, FREE) if first == FREE else np.arange(first, first + n) for first, n in pairs]
        )

    def of_table(self, table: int) -> range:
        """The options of a distinct table."""
        return range(int(self.first_option[table]), int(self.first_option[table + 1]))

    def shards_of(self, option: int) -> slice:
        """The runs of an option."""
        return slice(int(self.first_shard[option]), int(self.first_shard[option + 1]))

    def type_of(self, option: int) -> ShardingType:
        """The sharding type of an option."""
        return self.sharding_types[int(self.sharding_type[option])]

    def kernel_of(self, option: int) -> ComputeKernel:
        """The compute kernel of an option."""
        return self.compute_kernels[int(self.compute_kernel[option])]
