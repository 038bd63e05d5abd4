"""What the environment reads from the launcher, its work on the first rank, and processes of this host that end."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from tests import stranger

from shardwright.errors import DistributedError, InvalidInputError, NoPlanError, UnsupportedError
from shardwright.runtime.ranks import environment
from shardwright.runtime.ranks.group_store import has_ended
from shardwright_testing.simulated import run_simulated


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


@pytest.mark.parametrize(
    ("group", "text"),
    [(dist.GroupMember.NON_GROUP_MEMBER, "ranks that are not in the group"), ("gloo", "got 'gloo'")],
)
def test_from_process_group_of_a_rank_outside_of_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch, group: object, text: str
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(DistributedError, match=text):
        environment.ShardingEnv.from_process_group(group)


def run(work, *, world_size=3):
    def on_rank(env):
        try:
            return env.on_first_rank("counting", work)
        except Exception as error:
            return error

    return run_simulated(on_rank, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_work_on_the_first_rank_gives_every_rank_its_result(world_size):
    asked = []

    def work():
        asked.append(1)
        return 42

    assert run(work, world_size=world_size) == [42] * world_size
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [(NoPlanError("3 GiB are short"), NoPlanError), (ZeroDivisionError("by zero"), DistributedError)],
)
def test_error_on_the_first_rank_is_of_one_class_on_every_rank_if_it_is_ours(error, kind):
    def work():
        raise error

    own, *others = run(work)
    assert own is error
    for other in others:
        assert type(other) is kind
        assert f"rank 0 raised {type(error).__name__}: {error}" in str(other)


AT_EXIT = """
import atexit, os
from shardwright.runtime.ranks.group_store import has_ended

atexit.register(lambda: print(has_ended(parent)))
parent = os.getppid()
"""


def test_process_has_ended_once_it_has() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not has_ended(process.pid)
        process.communicate(b"\n")
        assert has_ended(process.pid)


def test_process_that_was_killed_has_ended_though_nobody_has_waited_for_it() -> None:
    with subprocess.Popen(["sleep", "infinity"]) as process:
        process.kill()
        deadline = time.monotonic() + 60
        while not has_ended(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.returncode is None
        assert has_ended(process.pid)


def test_process_that_runs_has_not_ended_for_one_whose_interpreter_ends() -> None:
    """Threads look at others until the very end: a rank that failed took its parent for gone, and removed its error."""
    assert stranger.run_python("-c", AT_EXIT).stdout == "False\n"
