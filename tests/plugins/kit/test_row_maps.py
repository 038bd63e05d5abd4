"""The kit's look at row maps."""

from __future__ import annotations

import attrs
import pytest

import shardwright as sw
from shardwright_testing.row_maps import check_row_map


@attrs.frozen
class Tilted(sw.RowsModulo):
    """The first part is said to get more than all ids, the second less than none."""

    name = "tilted"

    def id_fraction_of(self, part: int) -> float:
        return (1.5, -0.5)[part]


def test_check_row_map_refuses_a_share_of_ids_below_none() -> None:
    check_row_map("right", sw.RowsModulo(10, parts=2))
    with pytest.raises(AssertionError, match=r"is \[1\.5, -0\.5\]; each must be between 0 and 1"):
        check_row_map("tilted", Tilted(10, parts=2))
