"""The stages at which a rank may be lost, and what the others must say of it."""

from __future__ import annotations

import pytest
from tests.distributed.failures import faults
from tests.distributed.failures.strikes import VICTIM

from shardwright_testing.ranks import RankError, RankPool

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
    ("sums of dense gradients", "data_parallel", "DenseForm"),
]


def stages(*quick: str) -> list[object]:
    """All stages; those of other collectives than these, each of which takes a time-out, are slow."""
    return [pytest.param(*stage, marks=() if stage[0] in quick else pytest.mark.slow) for stage in STAGES]


def assert_killed_rank_is_named(pool: RankPool, *arguments: str | None) -> None:
    """By all others; ``arguments`` are those of :func:`faults.train_until` without the fault, the label first."""
    label, *others = arguments
    with pytest.raises(RankError) as error:
        pool.run(faults.train_until, 4, label, "kill", *others)
    assert error.value.errors == {VICTIM: "the process died"}
    assert_all_name_the_victim(error.value.results, str(label))


def assert_stuck_rank_is_named(pool: RankPool, *arguments: str | None) -> None:
    """By all others, and it raises, too; see :func:`assert_killed_rank_is_named`."""
    label, *others = arguments
    texts = dict(enumerate(pool.run(faults.train_until, 4, label, "stall", *others)))
    assert texts.pop(VICTIM).startswith("step 1: rank 1: the exchange of ")
    assert_all_name_the_victim(texts, str(label))


def assert_all_name_the_victim(texts: dict[int, str], label: str) -> None:
    """Each survivor raises; at least those that wait for the victim in the second step name the stage.

    A rank that is to get nothing from the victim in that step goes on to the headers of the next.
    """
    for rank, text in texts.items():
        here = f"step 1: rank {rank}: the exchange of ", f"step 2: rank {rank}: the exchange of headers "
        assert text.startswith(here), text
        assert f"no word from rank {VICTIM} in" in text, text
    assert any(f"the exchange of {label} failed: no word from" in text for text in texts.values()), texts
