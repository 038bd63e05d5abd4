"""A rank that is lost while a device waits for it, and not the host: the others name it, and their hosts come free."""

from __future__ import annotations

import pytest
from tests.distributed.failures import device_ranks
from tests.distributed.failures.strikes import VICTIM

from shardwright_testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed


def test_killed_rank_is_named_by_ranks_whose_devices_wait_for_it(pool: RankPool) -> None:
    with pytest.raises(RankError) as error:
        pool.run(device_ranks.lose_a_rank, 3, "kill")
    assert error.value.errors == {VICTIM: "the process died"}
    for rank, text in error.value.results.items():
        start = f"step 2: rank {rank}: the exchange of results failed: rank {VICTIM} has ended"
        assert text.startswith(start), text
        assert text.endswith("the device's collectives are aborted: go on from a checkpoint"), text


@pytest.mark.slow
def test_stuck_rank_is_named_by_ranks_whose_devices_wait_for_it(pool: RankPool) -> None:
    texts = dict(enumerate(pool.run(device_ranks.lose_a_rank, 3, "stall")))
    texts.pop(VICTIM)
    for rank, text in texts.items():
        start = f"step 2: rank {rank}: the exchange of results failed: no word from rank {VICTIM}"
        assert text.startswith(start), text
