"""The blocks of layouts as runs: neighbouring blocks of one size that are placed alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple, TypeAlias

from shardwright.planning.arrays import FREE, NO_GANG
from shardwright.planning.layouts.layout import Block, BlockRun, BlockRuns, Layout


class ShardRun(NamedTuple):
    """Neighbouring blocks of one size that are placed alike; the columns of the same names in ``Options`` say more.

    Args:
        num_rows: rows of each.
        num_columns: columns of each.
        gang: label of the blocks that share a host, or ``NO_GANG``.
        is_copy: every rank has a copy.
        id_fraction: the part of the table's lookups that is of the rows of each.
        rank: the rank of the first, the next on the next rank, and so on; or ``FREE``.
        local_rank: the rank of the first inside its host, likewise.
        length: number of blocks.
        device: type of the device of the ranks that they may be on.
    """

    num_rows: int
    num_columns: int
    gang: int
    is_copy: bool
    id_fraction: float
    rank: int
    local_rank: int
    length: int
    device: str = ""

    def continues(self, other: ShardRun) -> bool:
        """True if ``other`` begins where this ends and is of its kind."""
        return (
            self[:5] == other[:5]
            and other.rank == (FREE if self.rank == FREE else self.rank + self.length)
            and other.local_rank == (FREE if self.local_rank == FREE else self.local_rank + self.length)
        )


Runs: TypeAlias = tuple[ShardRun, ...]


def runs_of(layout: Layout, device: str, go_on: Callable[[], None] = lambda: None) -> Runs:
    """The blocks of a layout as runs, whose gangs are numbered from 0.

    Args:
        layout: the layout.
        device: type of the device of the ranks that its blocks may be on.
        go_on: called before a plugin is asked how many rows a block has, which may take long; ends that by raising.
    """
    pieces: Iterable[ShardRun]
    if isinstance(layout.blocks, BlockRuns):
        pieces = chain.from_iterable(_parts(layout, run, go_on) for run in layout.blocks.runs)
    else:
        pieces = (_single(layout, block, go_on) for block in layout.blocks)
    runs = list(_fold(pieces))
    labels = sorted({run.gang for run in runs} - {NO_GANG})
    gangs = {NO_GANG: NO_GANG, **{label: gang for gang, label in enumerate(labels)}}
    return tuple(run._replace(gang=gangs[run.gang], device=device) for run in runs)


def _number(value: int | None, offset: int = 0) -> int:
    return FREE if value is None else value + offset


def _single(layout: Layout, block: Block, go_on: Callable[[], None]) -> ShardRun:
    go_on()
    return ShardRun(
        block.num_rows,
        block.num_columns,
        NO_GANG if block.host_group is None else block.host_group,
        layout.dataflow_of(block).is_replicated,
        layout.row_map.id_fraction_of(block.rows.index),
        _number(block.rank),
        _number(block.local_rank),
        1,
    )


def _parts(layout: Layout, run: BlockRun, go_on: Callable[[], None]) -> Iterator[ShardRun]:
    """A run of blocks in pieces of equally many rows; what is known of one's ids is known of all."""
    is_copy = (run.dataflow or layout.dataflow).is_replicated
    for start, rows, count in run.sizes():
        go_on()
        yield ShardRun(
            rows,
            len(run.columns),
            NO_GANG if run.host_group is None else run.host_group,
            is_copy,
            run.row_map.id_fraction_of(run.first_part + (0 if run.is_copied else start)),
            _number(run.rank, start),
            _number(run.local_rank, start),
            count,
        )


def _fold(runs: Iterable[ShardRun]) -> Iterator[ShardRun]:
    """The runs, those joined that continue the one before."""
    last: ShardRun | None = None
    for run in runs:
        if last is not None and last.continues(run):
            last = last._replace(length=last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
