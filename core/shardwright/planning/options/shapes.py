"""The blocks of layouts as columns over runs: neighbouring blocks of one size that are placed alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from attrs import fields, frozen

from shardwright.planning.arrays import FREE, NO_GANG
from shardwright.planning.layouts.layout import Block, BlockRun, BlockRuns, Layout


@frozen(eq=False)
class Shape:
    """A layout's blocks as columns over runs of equal ones, and what holds for all of them."""

    num_rows: tuple[int, ...]
    num_columns: tuple[int, ...]
    rank: tuple[int, ...]
    gang: tuple[int, ...]
    local_rank: tuple[int, ...]
    count: tuple[int, ...]
    is_copy: tuple[bool, ...]
    id_fraction: tuple[float, ...]
    device: tuple[str, ...]
    num_gangs: int
    cuts_rows: bool
    is_replicated: bool
    sums_inside_host: bool

    @classmethod
    def of(cls, layout: Layout, device: str, go_on: Callable[[], None] = lambda: None) -> Shape:
        """The shape of a layout.

        Args:
            layout: the layout.
            device: type of the device of the ranks that its blocks may be on.
            go_on: called before a plugin is asked how many rows a block has, which may take long; ends that by raising.
        """
        runs, dataflows = list(_runs(layout, go_on)), layout.dataflows
        labels = sorted({run.host_group for run in runs if run.host_group is not None})
        gangs: dict[int | None, int] = {None: NO_GANG, **{label: gang for gang, label in enumerate(labels)}}
        return cls(
            num_rows=tuple(run.num_rows for run in runs),
            num_columns=tuple(run.num_columns for run in runs),
            rank=tuple(run.rank for run in runs),
            gang=tuple(gangs[run.host_group] for run in runs),
            local_rank=tuple(run.local_rank for run in runs),
            count=tuple(run.length for run in runs),
            is_copy=tuple(run.is_copy for run in runs),
            id_fraction=tuple(run.id_fraction for run in runs),
            device=(device,) * len(runs),
            num_gangs=len(labels),
            cuts_rows=layout.cuts_rows,
            is_replicated=all(dataflow.is_replicated for dataflow in dataflows),
            sums_inside_host=any(dataflow.sums_inside_host for dataflow in dataflows),
        )

    @property
    def of_runs(self) -> tuple[str, ...]:
        """The names of what has a value a run."""
        return tuple(attribute.name for attribute in fields(type(self)) if attribute.name not in _OF_ALL)

    @property
    def last_rank(self) -> int:
        """The highest rank that a block must live on, or ``FREE``."""
        return max(
            FREE if first == FREE else first + count - 1
            for first, count in zip(self.rank, self.count, strict=True)
        )

    @property
    def last_local_rank(self) -> int:
        """The highest rank inside a host that a block must have, or ``FREE``."""
        return max(
            FREE if first == FREE else first + count - 1
            for first, count in zip(self.local_rank, self.count, strict=True)
        )


_OF_ALL = ("num_gangs", "cuts_rows", "is_replicated", "sums_inside_host")


class _ShardRun(NamedTuple):
    """Neighbouring blocks of one size that are placed alike."""

    num_rows: int
    num_columns: int
    host_group: int | None
    is_copy: bool
    id_fraction: float
    rank: int
    local_rank: int
    length: int

    def continues(self, other: _ShardRun) -> bool:
        """True if ``other`` begins where this ends and is of its kind."""
        return (
            self[:5] == other[:5]
            and other.rank == (FREE if self.rank == FREE else self.rank + self.length)
            and other.local_rank == (FREE if self.local_rank == FREE else self.local_rank + self.length)
        )


def _number(value: int | None, offset: int = 0) -> int:
    return FREE if value is None else value + offset


def _runs(layout: Layout, go_on: Callable[[], None]) -> Iterator[_ShardRun]:
    """The blocks of a layout as runs."""
    if isinstance(layout.blocks, BlockRuns):
        return _fold(chain.from_iterable(_parts(layout, run, go_on) for run in layout.blocks.runs))
    return _fold(_single(layout, block, go_on) for block in layout.blocks)


def _single(layout: Layout, block: Block, go_on: Callable[[], None]) -> _ShardRun:
    go_on()
    return _ShardRun(
        block.num_rows,
        block.num_columns,
        block.host_group,
        layout.dataflow_of(block).is_replicated,
        layout.row_map.id_fraction_of(block.rows.index),
        _number(block.rank),
        _number(block.local_rank),
        1,
    )


def _parts(layout: Layout, run: BlockRun, go_on: Callable[[], None]) -> Iterator[_ShardRun]:
    """A run of blocks in pieces of equally many rows; what is known of one's ids is known of all."""
    is_copy = (run.dataflow or layout.dataflow).is_replicated
    for start, rows, count in run.sizes():
        go_on()
        yield _ShardRun(
            rows,
            len(run.columns),
            run.host_group,
            is_copy,
            run.row_map.id_fraction_of(run.first_part + (0 if run.is_copied else start)),
            _number(run.rank, start),
            _number(run.local_rank, start),
            count,
        )


def _fold(runs: Iterable[_ShardRun]) -> Iterator[_ShardRun]:
    """The runs, those joined that continue the one before."""
    last: _ShardRun | None = None
    for run in runs:
        if last is not None and last.continues(run):
            last = last._replace(length=last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
