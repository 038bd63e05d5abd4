"""Kernels whose ids are keys, tested as those of rows are: each row is asked for by the key that it was given.

Legend: N ids, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.planning.layouts.row_maps import RowMap

SIGHTINGS = 3
"""Number of lookups in training after which an id must have a row."""

_DIGIT = 128
"""Rows are marked with numbers to this base, which every float type holds exactly."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def keys_of(count: int, *, first: int = 1) -> Tensor:
    """Make different 64-bit numbers, negative ones among them: ``[count]`` int64."""
    return torch.arange(first, first + count) * _ODD  # an odd factor permutes the numbers modulo 2 ** 64


@frozen
class AllKeys(RowMap):
    """Every key in one part."""

    name: ClassVar[str] = "all_keys"
    takes_any_id: ClassVar[bool] = True
    num_rows: int

    @property
    def num_parts(self) -> int:  # noqa: D102 - described in the base class
        return 1

    def part_of(self, ids: Any) -> Any:  # noqa: D102
        return ids * 0

    def local_row_of(self, ids: Any) -> Any:  # noqa: D102
        return ids

    def rows_of(self, part: int) -> slice:  # noqa: D102
        return slice(0, self.num_rows)


class RowsOfKeys:
    """A lookup of keys as one of rows: all its rows are born, and row ``r`` is the one that ``keys[block][r]`` has.

    Args:
        lookup: lookup that a kernel for any id has built.
        what: its name, for messages.

    Raises:
        AssertionError: keys, as many as there are rows, do not each have a row after they were seen.
    """

    def __init__(self, lookup: Lookup, what: str) -> None:
        self.lookup, self.blocks = lookup, lookup.blocks
        self.keys = [keys_of(spec.block.num_rows) for spec in self.blocks]
        every_row = _each_row_once(self.blocks)
        for _ in range(SIGHTINGS):
            self.forward(every_row, training=True)
        self._find_rows(what, every_row)

    def _find_rows(self, what: str, every_row: Bags) -> None:
        """Mark the rows, and see which marks the keys bring."""
        for block in range(len(self.blocks)):
            weight = self.weight(block)
            rows = torch.arange(len(weight))
            weight[:, 0], weight[:, 1] = rows % _DIGIT + 1, rows // _DIGIT
        marks, _ = self.forward(every_row, training=False)
        sizes = [spec.block.num_rows * spec.num_slots * spec.block.num_columns for spec in self.blocks]
        for block, own in enumerate(marks.reshape(-1).split(sizes)):
            num_rows, num_columns = self.weight(block).shape
            digits = own.view(-1, num_columns)[:num_rows, :2].long()
            rows = digits[:, 0] - 1 + digits[:, 1] * _DIGIT
            assert rows.sort().values.tolist() == list(range(num_rows)), (
                f"{what}: {num_rows} keys were looked up in training {SIGHTINGS} times, in a block of {num_rows} rows; "
                f"{int((rows >= 0).sum())} of them have rows, {len(set(rows[rows >= 0].tolist()))} different ones"
            )
            self.keys[block] = self.keys[block][rows.argsort()]

    def _with_keys(self, bags: Bags) -> Bags:
        starts = torch.tensor([0, *(len(keys) for keys in self.keys)]).cumsum(0)
        of_slot = torch.tensor(
            [start for start, spec in zip(starts, self.blocks, strict=False) for _ in range(spec.num_slots)]
        )
        of_bag = of_slot.repeat(len(bags.counts)).repeat_interleave(torch.tensor(bags.flat_counts))
        return evolve(bags, ids=torch.cat(self.keys)[bags.per_id(of_bag) + bags.ids])

    def take_over(self, other: RowsOfKeys, block: int, what: str) -> Tensor:
        """Load the rows of another lookup, as from a checkpoint; which of its rows each is: ``[R]``."""
        source = self.lookup.row_index(block).load(other.lookup.row_index(block).state())
        num_rows, kept = len(other.keys[block]), sorted(source.tolist())
        assert kept == list(range(num_rows)), (
            f"{what}: load() takes over rows {kept} of the {num_rows} that state() has and part_of sends here"
        )
        self.keys[block] = other.keys[block][source]
        return source

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        """Look rows up by their keys."""
        return self.lookup.forward(self._with_keys(bags), training=training)

    def prepare(self, bags: Bags) -> Any:
        """Prepare a backward pass by the keys of rows."""
        return self.lookup.prepare(self._with_keys(bags))

    def prefetch(self, bags: Bags) -> None:
        """Tell it of rows that are looked up soon."""
        self.lookup.prefetch(self._with_keys(bags))

    def __getattr__(self, name: str) -> Any:
        """Attributes of the lookup that no ids are given to."""
        return getattr(self.lookup, name)


def _each_row_once(blocks: Sequence[BlockSpec]) -> Bags:
    """A bag for each row of each block, in each of its slots."""
    sizes = [spec.block.num_rows for spec in blocks for _ in range(spec.num_slots)]
    return Bags(
        ids=torch.cat([torch.arange(size) for size in sizes]),
        lengths=None,
        weights=None,
        counts=(tuple(sizes),),
    )
