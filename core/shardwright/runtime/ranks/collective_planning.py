"""Planning on one rank: the others wait as long as it takes, and all get the same plan or the same error.

The collectives of a process group have a time-out, and planning may take longer. So the rank that plans sends a sign
of life every few seconds. Each collective is short, and a waiting rank gives up only if the signs stop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from attrs import define, field

from shardwright.errors import PlanningError, ShardwrightError
from shardwright.planning.watch import Watch
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.group_store import GroupStore

_Result = TypeVar("_Result")

BEAT_S = 2.0
"""Seconds between two signs of life, if a process group's time-out is at least four times as long."""


def on_one_rank(
    env: ShardingEnv,
    work: Callable[[ShardingEnv, Watch], _Result],
    watch: Watch,
    *,
    to_text: Callable[[_Result], str],
    from_text: Callable[[str], _Result],
    beat_s: float | None = None,
) -> _Result:
    """Do some work on rank 0 and give its result to every rank.

    Every rank makes this call. Rank 0 broadcasts a sign of life every ``beat_s``, and at the end the result or the
    error. It reads its own text back before it sends it, so that an unreadable result raises on every rank. Ctrl-C on
    any rank is left to rank 0, which ends the work early.

    Args:
        env: the ranks.
        work: function called on rank 0 with ``env`` and ``watch``, on a thread of its own.
        watch: tells the work when to end.
        to_text: writes the result as text.
        from_text: reads the result from text, on every rank.
        beat_s: seconds between two signs of life; ``BEAT_S`` by default.

    Raises:
        ShardwrightError: the work failed, with the same error on every rank, or its result cannot be read.
    """

    def written(env: ShardingEnv, watch: Watch) -> tuple[str, _Result]:
        text = to_text(work(env, watch))
        try:
            return text, from_text(text)
        except ShardwrightError as error:
            raise PlanningError(f"what was made on rank 0 cannot be read again: {error}") from error

    with env.phase("planning"), watch.interruptible():
        if env.rank != 0:
            return from_text(_wait(env))
        task = _Task(env, written, watch)
        try:
            task.start()
            while not task.is_done(beat_s or _beat_s(env)):
                _send(env, {"working": True})
            text, result = task.result()
        except BaseException as error:
            # Whatever it is, an interrupt too: the other ranks are waiting, and must hear of it.
            facts = error.facts if isinstance(error, ShardwrightError) else {}
            _send(env, {"error": type(error).__name__, "text": str(error), "facts": facts})
            raise
        _send(env, {"text": text})
        return result


def _beat_s(env: ShardingEnv) -> float:
    if env.process_group is None:
        return BEAT_S
    return min(BEAT_S, GroupStore.of(env.process_group).timeout_s / 4)


def _send(env: ShardingEnv, answer: dict[str, Any]) -> None:
    env.communicator.broadcast_object(answer, source=0)


def _wait(env: ShardingEnv) -> str:
    """Wait for the text that rank 0 sends at the end, and return it."""
    while True:
        answer = env.communicator.broadcast_object(None, source=0)
        if "error" in answer:
            raise _same_error(answer)
        if "text" in answer:
            return str(answer["text"])


def _same_error(answer: dict[str, Any]) -> ShardwrightError:
    """Rebuild rank 0's error if its class is one of ours; else a ``PlanningError`` with its text."""
    from shardwright import errors

    kind = getattr(errors, answer["error"], None)
    if isinstance(kind, type) and issubclass(kind, ShardwrightError):
        return kind(answer["text"], **answer["facts"])
    return PlanningError(f"planning failed on rank 0: {answer['error']}: {answer['text']}")


@define(eq=False)
class _Task:
    """Work on a thread of its own, while the main thread sends signs of life."""

    env: ShardingEnv
    work: Callable[[ShardingEnv, Watch], tuple[str, Any]]
    watch: Watch
    _done: threading.Event = field(factory=threading.Event)
    _result: tuple[str, Any] | None = None
    _error: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="planning", daemon=True).start()

    def is_done(self, wait_s: float) -> bool:
        """Wait at most ``wait_s`` seconds; true if the work has ended."""
        return self._done.wait(wait_s)

    def result(self) -> tuple[str, Any]:
        """Return the result of the work, or raise its error."""
        if self._error is not None:
            raise self._error
        assert self._result is not None  # it is done
        return self._result

    def _run(self) -> None:
        try:
            self._result = self.work(self.env, self.watch)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
