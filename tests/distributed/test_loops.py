"""Training loops that people write: either they train as one process does, or an error on all ranks says what to do."""

from __future__ import annotations

import pytest
from tests.distributed import loop_workers
from tests.equality import Case
from tests.plugins.test_equality import tables_of

from shardwright.testing.ranks import RankPool

pytestmark = pytest.mark.distributed


def same_text(texts: list[str]) -> str:
    """The text of all ranks."""
    assert len(set(texts)) == 1, texts
    return texts[0]


@pytest.mark.parametrize("how", ["variable", "by hand"])
def test_local_world_size_that_differs_on_one_rank_is_the_same_error_on_all(pool: RankPool, how: str) -> None:
    case = Case(tables_of("table_row_wise", "fused_torch"), (3, 2, 4, 1), local_world_size=2)
    text = same_text(pool.run(loop_workers.local_world_sizes_that_differ, 4, case, how))
    assert text.startswith("DistributedError: the ranks differ in how many of them a host has: ranks 0, 2, 3: ")
    assert "LOCAL_WORLD_SIZE 2; rank 1: LOCAL_WORLD_SIZE 1. Give every rank the same" in text


def test_local_world_size_that_is_no_number_is_the_same_error_on_all(pool: RankPool) -> None:
    case = Case(tables_of("table_wise", "fused_torch"), (3, 2))
    text = same_text(pool.run(loop_workers.local_world_sizes_that_differ, 2, case, "no number"))
    assert text.startswith("DistributedError: rank 1: LOCAL_WORLD_SIZE is 'many'")
