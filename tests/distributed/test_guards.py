"""Guards over loops on real ranks: what they cost."""

from __future__ import annotations

import pytest
from tests.distributed import guards_workers

from shardwright_testing.ranks import RankPool

MOST_CALLS = 40
"""Calls of Python functions a step, as promised."""


pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("update", ["in_backward", "in_step"])
def test_guards_make_few_calls_a_step(pool: RankPool, update: str) -> None:
    for counts in pool.run(guards_workers.calls_in_steps, 2, update, 10):
        assert 0 < min(counts) <= MOST_CALLS
