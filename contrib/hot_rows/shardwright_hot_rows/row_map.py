"""The row map: the hot rows in one part, the cold ones in equal runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

import shardwright as sw

HOT = 0
"""The part of the hot rows; the cold ones are in the parts after it."""


def _sorted(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(values))


@frozen(slots=False, cache_hash=True)
class HotAndCold(sw.RowMap):
    """A row map whose part 0 holds the hot rows, and each further part a run of the remaining, cold rows.

    Args:
        num_rows: number of rows of the table.
        hot: the hot rows.
        cold_parts: number of runs that the other rows are cut into.
        hot_share: the share of all lookups that the hot rows get.

    Raises:
        InvalidInputError: a hot row is not in the table or named twice, or the share is not between 0 and 1.
    """

    name: ClassVar[str] = "hot_and_cold"
    keeps_neighbours: ClassVar[bool] = False
    num_rows: int
    hot: tuple[int, ...] = field(converter=_sorted, repr=lambda rows: f"<{len(rows)} rows>")
    cold_parts: int
    hot_share: float

    def __attrs_post_init__(self) -> None:
        outside = [row for row in self.hot if not 0 <= row < self.num_rows]
        if outside or len(set(self.hot)) < len(self.hot):
            what = f"row {outside[0]} is not in it" if outside else "some are named twice"
            raise sw.InvalidInputError(f"{len(self.hot)} hot rows of a table of {self.num_rows}: {what}")
        if not 0.0 <= self.hot_share <= 1.0:
            raise sw.InvalidInputError(f"hot_share must be between 0 and 1, got {self.hot_share}")

    @property
    def num_parts(self) -> int:
        """The hot part and the cold ones."""
        return 1 + self.cold_parts

    @cached_property
    def _hot(self) -> npt.NDArray[np.int64]:
        return np.array(self.hot, dtype=np.int64)

    @property
    def _cold(self) -> sw.RowsRange:
        """The cold rows, numbered without the hot ones, in their parts."""
        return sw.RowsRange(self.num_rows - len(self.hot), parts=self.cold_parts)

    def _placed(self, ids: Any) -> tuple[Any, Any]:
        """Number of hot rows before each id, and a mask of the ids that are hot: ``[N]`` each."""
        if isinstance(ids, np.ndarray):
            before = np.searchsorted(self._hot, ids)
            return before, np.append(self._hot, np.iinfo(np.int64).max)[before] == ids
        import torch

        hot = torch.from_numpy(self._hot).to(ids.device, ids.dtype)
        smaller = torch.searchsorted(hot, ids)
        # A row is hot if the first hot one that is not before it is itself.
        following = torch.nn.functional.pad(hot, (0, 1), value=torch.iinfo(ids.dtype).max)[smaller]
        return smaller, following == ids

    def part_of(self, ids: Any) -> Any:
        """0 for a hot row, then the cold runs."""
        before, is_hot = self._placed(ids)
        return (1 + self._cold.part_of(ids - before)) * ~is_hot

    def local_row_of(self, ids: Any) -> Any:
        """A hot row's place among the hot ones, a cold row's in its run."""
        before, is_hot = self._placed(ids)
        return before * is_hot + self._cold.local_row_of(ids - before) * ~is_hot

    def rows_of(self, part: int) -> npt.NDArray[np.int64]:
        """The rows of a part, in ascending order."""
        if part == HOT:
            return self._hot
        cold = np.arange(self.num_rows)
        return np.delete(cold, self._hot)[self._cold.rows_of(part - 1)]

    def num_rows_of(self, part: int) -> int:
        """Number of rows of a part."""
        return len(self.hot) if part == HOT else self._cold.num_rows_of(part - 1)

    def id_fraction_of(self, part: int) -> float:
        """The hot rows get their share of the lookups; the rest is spread evenly over the others."""
        if part == HOT:
            return self.hot_share
        num_cold = self.num_rows - len(self.hot)
        return (1.0 - self.hot_share) * self._cold.num_rows_of(part - 1) / max(num_cold, 1)
