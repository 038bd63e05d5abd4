"""The columns of all options while they grow."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain
from operator import attrgetter

import numpy as np

from shardwright.planning.arrays import FREE, NO_GANG, Bools, Ints
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.offers import Offers
from shardwright.planning.options.options import Options, Refusal
from shardwright.planning.options.shapes import Shape
from shardwright.planning.tables.spec import TableSpec


class OptionColumns:
    """Columns while they grow."""

    def __init__(self) -> None:
        self.tables: list[TableSpec] = []
        self.refused: list[tuple[Refusal, ...]] = []
        self.option_table: list[int] = []
        self._all_tables: list[TableSpec] = []
        self._alike: list[int] = []
        self._known: dict[Hashable, int] = {}
        self._ids: list[float] = []
        self._bags: list[float] = []
        self._types: list[int] = []
        self._kernels: list[int] = []
        self._layouts: list[Layout] = []
        self._shapes: list[Shape] = []
        self._requests: list[list[int]] = []

    def add_table(self, table: TableSpec, key: Hashable) -> bool:
        """Add a table; whether it is like none before it."""
        index = self._known.setdefault(key, len(self.tables))
        is_new = index == len(self.tables)
        if is_new:
            self.tables.append(table)
        self._all_tables.append(table)
        self._alike.append(index)
        return is_new

    def add_lookups(self, ids: float, bags: float) -> None:
        """Add the ids that a rank looks up in the last distinct table in a step, and the vectors it gets back."""
        self._ids.append(ids)
        self._bags.append(bags)

    def add_option(self, kind: int, kernel: int, layout: Layout, shape: Shape, requests: list[int]) -> None:
        """Add an option of the last distinct table: codes of type and kernel, its layout, and a request code a run."""
        self.option_table.append(len(self.tables) - 1)
        self._types.append(kind)
        self._kernels.append(kernel)
        self._layouts.append(layout)
        self._shapes.append(shape)
        self._requests.append(requests)

    def finish(self, offers: Offers) -> Options:
        """All that was added, as columns."""
        counts = np.array([len(shape.rank) for shape in self._shapes], dtype=np.int64)
        table = np.array(self.option_table, dtype=np.int64)
        rank, gang, local_rank = self._places(offers.topology)
        return Options(
            tables=tuple(self.tables),
            all_tables=tuple(self._all_tables),
            distinct_table=np.array(self._alike, dtype=np.int64),
            sharding_types=tuple(offers.types.values()),
            compute_kernels=tuple(offers.kernels.values()),
            requests=tuple(offers.request_codes),
            refused=tuple(self.refused),
            ids_per_batch=np.array(self._ids),
            bags_per_batch=np.array(self._bags),
            first_option=np.searchsorted(table, np.arange(len(self.tables) + 1)).astype(np.int64),
            table=table,
            sharding_type=np.array(self._types, dtype=np.int64),
            compute_kernel=np.array(self._kernels, dtype=np.int64),
            layouts=tuple(self._layouts),
            cuts_rows=self._flags(attrgetter("cuts_rows")),
            is_replicated=self._flags(attrgetter("is_replicated")),
            sums_inside_host=self._flags(attrgetter("sums_inside_host")),
            first_shard=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            option=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
            count=self._joined(attrgetter("count")),
            num_rows=self._joined(attrgetter("num_rows")),
            num_columns=self._joined(attrgetter("num_columns")),
            is_copy=np.array(list(chain.from_iterable(shape.is_copy for shape in self._shapes)), dtype=bool),
            id_fraction=np.array(
                list(chain.from_iterable(shape.id_fraction for shape in self._shapes)), dtype=np.float64
            ),
            rank=rank,
            gang=gang,
            local_rank=local_rank,
            request=np.array(list(chain.from_iterable(self._requests)), dtype=np.int64),
        )

    def _flags(self, flag_of: Callable[[Shape], bool]) -> Bools:
        return np.array(list(map(flag_of, self._shapes)), dtype=bool)

    def _joined(self, column_of: Callable[[Shape], tuple[int, ...]]) -> Ints:
        return np.array(list(chain.from_iterable(map(column_of, self._shapes))), dtype=np.int64)

    def _places(self, topology: Topology) -> tuple[Ints, Ints, Ints]:
        """Rank, gang and rank in the host of each run; on one host that rank is the rank, and there are no gangs."""
        rank, local_rank = self._joined(attrgetter("rank")), self._joined(attrgetter("local_rank"))
        if topology.num_hosts > 1:
            return rank, self._gangs(), local_rank
        rank = np.where(local_rank == FREE, rank, local_rank)
        return rank, np.full_like(rank, NO_GANG), np.full_like(rank, FREE)

    def _gangs(self) -> Ints:
        """The gangs of each option, with numbers that no other has."""
        gangs = self._joined(attrgetter("gang"))
        counts = np.array([shape.num_gangs for shape in self._shapes], dtype=np.int64)
        # Gangs are numbered from 0 inside an option: they are shifted by the gangs of the options before it.
        before = np.repeat(np.cumsum(counts) - counts, [len(shape.rank) for shape in self._shapes])
        return np.where(gangs == NO_GANG, NO_GANG, gangs + before)
