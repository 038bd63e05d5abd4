"""A rank that is killed or stuck between any two collectives: the others raise, naming it and the collective."""

from __future__ import annotations

import pytest
from tests.distributed import faults

from shardwright.testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed

STAGES = [
    *((label, "row_wise", None) for label in ("headers", "ids", "results", "gradients")),
    *(
        (f"{what} {where}", "table_row_wise", None)
        for what in ("results", "gradients")
        for where in ("inside the host", "across hosts")
    ),
    ("updates of copies", "data_parallel", "BatchForm"),
    ("updates of copies", "data_parallel", "RowsForm"),
    ("dense gradients", "data_parallel", "DenseForm"),
    ("dense sums", "data_parallel", "DenseForm"),
]


def assert_all_name_the_victim(texts: dict[int, str], label: str) -> None:
    """Each survivor raises in the second step; at least those that wait for the victim name the stage."""
    for rank, text in texts.items():
        assert text.startswith(f"step 1: rank {rank}: the exchange of "), text
        assert f"no word from rank {faults.VICTIM} in" in text, text
    assert any(f"the exchange of {label} failed: no word from" in text for text in texts.values()), texts


@pytest.mark.parametrize(("label", "sharding_type", "form"), STAGES)
def test_rank_that_is_killed_is_named_by_all_others(
    pool: RankPool, label: str, sharding_type: str, form: str | None
) -> None:
    with pytest.raises(RankError) as error:
        pool.run(faults.train_until, 4, label, "kill", sharding_type, form, timeout_s=60)
    assert error.value.errors == {faults.VICTIM: "the process died"}
    assert_all_name_the_victim(error.value.results, label)


@pytest.mark.parametrize(("label", "sharding_type", "form"), STAGES)
def test_rank_that_is_stuck_is_named_by_all_others(
    pool: RankPool, label: str, sharding_type: str, form: str | None
) -> None:
    texts = dict(
        enumerate(pool.run(faults.train_until, 4, label, "stall", sharding_type, form, timeout_s=60))
    )
    assert texts.pop(faults.VICTIM).startswith("step 1: rank 1: the exchange of ")
    assert_all_name_the_victim(texts, label)
