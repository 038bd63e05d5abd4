"""The calls of a small training step, in which they take most of the time."""

from __future__ import annotations

import pytest
from tests.distributed.steps import call_workers

from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed

MOST = dict(
    zip(
        call_workers.MIXES,
        [(316, 258), (346, 308), (317, 258), (286, 245), (500, 466)],
        strict=True,
    )
)
"""Python and C calls of each mix of types; a few less are made, and a new layer makes more."""


@pytest.mark.parametrize("types", call_workers.MIXES)
def test_step_makes_no_more_calls_than_its_mix_of_types_needs(pool: RankPool, types: str) -> None:
    pytest.importorskip("numba")  # without it another kernel is chosen
    calls = min(pool.run(call_workers.calls_of_step, 2, types), key=lambda own: own.num_all)
    assert (calls.python.total() <= MOST[types][0], calls.native.total() <= MOST[types][1]) == (True, True)
