"""What the ranks of a process group do together, as threads that share a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardwright.errors import DistributedError, InvalidInputError, NoPlanError
from shardwright.runtime.ranks import group_ranks
from shardwright.runtime.ranks.group_ranks import GroupRanks

WORLD_SIZE = 3
SHORT_S, FAR_OFF_S = 2.0, 60.0


def ranks_of(store: Any, timeout_s: float = FAR_OFF_S) -> list[GroupRanks]:
    """The ranks of a group over a store, each as it sees itself."""
    made = []
    for rank in range(WORLD_SIZE):
        with (
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(dist, "get_process_group_ranks", return_value=list(range(WORLD_SIZE))),
            mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo"),
            mock.patch.object(group_ranks, "store_of", return_value=store),
            mock.patch.object(group_ranks, "timeout_of", return_value=timedelta(seconds=timeout_s)),
        ):
            made.append(GroupRanks(mock.Mock(spec=dist.ProcessGroup)))
    return made


def on_each(ranks: list[GroupRanks], call: Callable[[GroupRanks], Any]) -> list[Any]:
    """What a call gives on each rank, or raises."""

    def outcome(own: GroupRanks) -> Any:
        try:
            return call(own)
        except Exception as error:
            return error

    with ThreadPoolExecutor() as threads:
        return list(threads.map(outcome, ranks))


def failing(error: Exception, *, where: int = 1) -> Callable[[GroupRanks], str]:
    """Work in which one rank raises, while the others wait for it."""

    def work(own: GroupRanks) -> str:
        with own.together("the work"):
            if own.name == where:
                raise error
            own.meet("the rest")
        return "done"

    return work


@pytest.mark.parametrize("where", range(WORLD_SIZE))
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidInputError("wrong"), InvalidInputError),
        (NoPlanError("none"), NoPlanError),
        (MemoryError("no memory"), DistributedError),
        (type("Own", (InvalidInputError,), {})("of a plugin"), InvalidInputError),
    ],
    ids=["ours", "a subclass", "another", "a plugin's"],
)
def test_error_of_one_rank_is_of_its_class_on_all_and_they_go_on_together(
    error: Exception, kind: type[Exception], where: int
) -> None:
    ranks = ranks_of(dist.HashStore())
    for rank, raised in enumerate(on_each(ranks, failing(error, where=where))):
        if rank == where:
            assert raised is error
            continue
        assert type(raised) is kind
        assert f"rank {where} raised {type(error).__name__}: {error}" in str(raised)
    assert on_each(ranks, failing(error, where=9)) == ["done"] * 3


def test_attributes_of_an_error_are_those_of_the_other_ranks_too() -> None:
    ranks = ranks_of(dist.HashStore())
    error = InvalidInputError("wrong", subject="t0", asked=[3, "x"], possible=("a", "b"))
    assert [raised.facts for raised in on_each(ranks, failing(error))] == [error.facts] * 3
    odd = InvalidInputError("wrong", subject="t0", asked=timedelta(seconds=3))
    assert [str(raised.asked) for raised in on_each(ranks, failing(odd))] == ["0:00:03"] * 3


def test_of_an_error_of_gloo_the_first_sentence_is_repeated() -> None:
    own = ranks_of(dist.HashStore(), SHORT_S)[0]
    text = "[/w/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:7. This is typically caused by a crash. GLHF!"
    said = str(own.failure("the exchange", RuntimeError(text), time.monotonic()))
    assert said.endswith(": Connection closed by peer [127.0.0.1]:7")
    assert "pair.cc" not in said


def test_rank_that_does_not_come_is_named_and_awaited_again_later() -> None:
    ranks = ranks_of(dist.HashStore(), SHORT_S)
    for error in on_each(ranks[:2], lambda own: own.meet("it")):
        assert isinstance(error, DistributedError)
        assert "it failed: no word from rank 2 in" in str(error)
    assert on_each(ranks, lambda own: own.meet("it")) == [True] * 3


def test_busy_rank_is_waited_for_longer_than_the_time_out() -> None:
    ranks = ranks_of(dist.HashStore(), SHORT_S)

    def work(own: GroupRanks) -> bool:
        if own.name == 0:
            with own.busy():
                time.sleep(1.5 * SHORT_S)
        return own.meet("the result")

    assert on_each(ranks, work) == [True] * 3


def test_rank_0_leaves_last_since_its_process_may_serve_the_store_and_nothing_is_left_there() -> None:
    store, events = dist.HashStore(), list[str]()
    ranks = ranks_of(store)
    on_each(ranks, lambda own: own.meet("the first"))
    kept = store.num_keys()
    read = ranks[2].store.read

    def read_late(*args: Any, **kwargs: Any) -> list[str]:
        time.sleep(0.5)
        answer = read(*args, **kwargs)
        events.append("rank 2 has read")
        return answer

    ranks[2].store.read = read_late  # type: ignore[method-assign]

    def meet(own: GroupRanks) -> None:
        own.meet("it")
        events.append(f"rank {own.name} has left")

    on_each(ranks, meet)
    assert events.index("rank 1 has left") < events.index("rank 2 has read") < events.index("rank 0 has left")
    assert store.num_keys() == kept


def test_error_that_ends_a_process_is_said_only_if_nothing_was_said_before() -> None:
    store = dist.HashStore()
    ranks = ranks_of(store, SHORT_S)
    with mock.patch.dict(dist.distributed_c10d._world.pg_map, {own._group(): None for own in ranks}):
        ranks[1].hear("raised A", is_last=False)
        ranks[1].hear("ended with B", is_last=True)
        ranks[2].hear("ended with C", is_last=True)
    assert reported(ranks[0]) == "rank 1 raised A; rank 2 ended with C"


def reported(own: GroupRanks) -> str:
    """What a rank hears of the others after a failure."""
    return own.store.after("it", time.monotonic())


def test_failure_is_heard_by_a_rank_that_waits_for_a_collective() -> None:
    ranks, is_closed = ranks_of(dist.HashStore()), threading.Event()

    class Never:
        """A collective that does not end."""

        def wait(self, timeout: timedelta) -> None:
            is_closed.wait(timeout.total_seconds())
            raise RuntimeError("time is up")

        def is_completed(self) -> bool:
            return False

    def work(own: GroupRanks) -> None:
        with own.together("the work"):
            if own.name == 1:
                raise InvalidInputError("wrong")
            own.wait(Never(), timedelta(seconds=FAR_OFF_S))

    for error in on_each(ranks, work):
        assert isinstance(error, InvalidInputError)


class EndsLate:
    """A collective that ends just after the first wait for it was given up, well or with an error."""

    def __init__(self, error: str = "") -> None:
        self._error, self._is_completed = error, False

    def wait(self, timeout: timedelta | None = None) -> str:
        if not self._is_completed:
            self._is_completed = True
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)
        return "ended"

    def is_completed(self) -> bool:
        return self._is_completed


def test_collective_that_ends_as_a_wait_for_it_is_given_up_has_ended() -> None:
    own, *_ = ranks_of(dist.HashStore())
    with mock.patch.object(own, "meet"), own.together("the work"):
        assert own.wait(EndsLate(), timedelta(seconds=FAR_OFF_S)) == "ended"
        with pytest.raises(RuntimeError, match="connection closed"):
            own.wait(EndsLate("connection closed"), timedelta(seconds=FAR_OFF_S))
