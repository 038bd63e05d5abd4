"""What the environment reads from the launcher."""

from __future__ import annotations

import pytest

from shardwright.errors import DistributedError, InvalidInputError, UnsupportedError
from shardwright.runtime.ranks import environment


@pytest.mark.parametrize("told", ["x", "0", "-1", "1.5"])
def test_local_world_size_that_is_no_number_of_ranks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    with pytest.raises(
        DistributedError, match=f"LOCAL_WORLD_SIZE is '{told}'; it must be the number of ranks"
    ):
        environment._local_world_size(4)


@pytest.mark.parametrize(("told", "expected"), [("", 4), ("2", 2)])
def test_local_world_size_is_what_the_launcher_says_or_all(
    monkeypatch: pytest.MonkeyPatch, told: str, expected: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert environment._local_world_size(4) == expected


def test_from_local_is_this_process_alone() -> None:
    env = environment.ShardingEnv.from_local(1, 0)
    assert (env.world_size, env.rank, env.process_group) == (1, 0, None)
    with pytest.raises(
        UnsupportedError, match=r"world_size=4\): nothing connects 4 ranks without a process group"
    ):
        environment.ShardingEnv.from_local(4, 1)
    with pytest.raises(InvalidInputError, match="rank must be 0 in a world of 1, got 1"):
        environment.ShardingEnv.from_local(1, 1)
