"""The columns of all options while they grow."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from shardwright.planning.arrays import FREE, NO_GANG, Bools, Ints
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.offers import Offers
from shardwright.planning.options.options import Options, Refusal
from shardwright.planning.options.shapes import Runs, ShardRun
from shardwright.planning.tables.spec import TableSpec

Option: TypeAlias = tuple[int, int, Layout, Runs, list[int]]
"""Codes of a sharding type and a kernel, a layout, its runs, and the code of what the kernel is asked for each run."""


class OptionColumns:
    """Columns while they grow."""

    def __init__(self) -> None:
        self.tables: list[TableSpec] = []
        self.refused: list[tuple[Refusal, ...]] = []
        self._all_tables: list[TableSpec] = []
        self._alike: list[int] = []
        self._known: dict[Hashable, int] = {}
        self._lookups: list[tuple[float, float]] = []
        self._option_table: list[int] = []
        self._options: list[Option] = []

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
        self._lookups.append((ids, bags))

    def add_options(self, options: list[Option], refused: tuple[Refusal, ...]) -> None:
        """Add the options of the last distinct table, and what was refused for it."""
        self._option_table += [len(self.tables) - 1] * len(options)
        self._options += options
        self.refused.append(refused)

    def finish(self, offers: Offers) -> Options:
        """All that was added, as columns."""
        types, kernels, layouts, of_options, requests = zip(*self._options, strict=True)
        counts = np.array(list(map(len, of_options)), dtype=np.int64)
        table = np.array(self._option_table, dtype=np.int64)
        ids, bags = np.array(self._lookups, dtype=np.float64).T.copy()
        runs = list(chain.from_iterable(of_options))
        rank, gang, local_rank = _places(runs, of_options, offers.topology)
        return Options(
            tables=tuple(self.tables),
            all_tables=tuple(self._all_tables),
            distinct_table=np.array(self._alike, dtype=np.int64),
            sharding_types=tuple(offers.types.values()),
            compute_kernels=tuple(offers.kernels.values()),
            requests=tuple(offers.request_codes),
            refused=tuple(self.refused),
            ids_per_batch=ids,
            bags_per_batch=bags,
            first_option=np.searchsorted(table, np.arange(len(self.tables) + 1)).astype(np.int64),
            table=table,
            sharding_type=np.array(types, dtype=np.int64),
            compute_kernel=np.array(kernels, dtype=np.int64),
            layouts=layouts,
            cuts_rows=_flags(layouts, "cuts_rows"),
            is_replicated=_flags(layouts, "is_replicated"),
            sums_inside_host=_flags(layouts, "sums_inside_host"),
            first_shard=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            option=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
            count=_numbers(runs, "length"),
            num_rows=_numbers(runs, "num_rows"),
            num_columns=_numbers(runs, "num_columns"),
            is_copy=_flags(runs, "is_copy"),
            id_fraction=np.array([run.id_fraction for run in runs], dtype=np.float64),
            rank=rank,
            gang=gang,
            local_rank=local_rank,
            request=np.array(list(chain.from_iterable(requests)), dtype=np.int64),
        )


def _flags(values: Iterable[object], name: str) -> Bools:
    return np.array(list(map(attrgetter(name), values)), dtype=bool)


def _numbers(runs: Iterable[ShardRun], name: str) -> Ints:
    return np.array(list(map(attrgetter(name), runs)), dtype=np.int64)


def _places(
    runs: Sequence[ShardRun], of_options: Sequence[Runs], topology: Topology
) -> tuple[Ints, Ints, Ints]:
    """Rank, gang and rank in the host of each run; on one host that rank is the rank, and there are no gangs."""
    rank, gang, local_rank = (_numbers(runs, name) for name in ("rank", "gang", "local_rank"))
    if topology.num_hosts == 1:
        rank = np.where(local_rank == FREE, rank, local_rank)
        return rank, np.full_like(rank, NO_GANG), np.full_like(rank, FREE)
    # Gangs are numbered from 0 inside an option: they are shifted by the gangs of the options before it.
    counts = np.array([1 + max(run.gang for run in own) for own in of_options], dtype=np.int64)
    before = np.repeat(np.cumsum(counts) - counts, list(map(len, of_options)))
    return rank, np.where(gang == NO_GANG, NO_GANG, gang + before), local_rank
