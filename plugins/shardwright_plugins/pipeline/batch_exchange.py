"""The exchange of one batch by all collections that get their ids ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.together import is_lost
from shardwright.runtime.step.batches.rank_problems import Status, goes_on
from shardwright.runtime.step.engine import EngineStep
from shardwright_plugins.pipeline.batch_tree import Path
from shardwright_plugins.pipeline.fetching import Fetched
from shardwright_plugins.pipeline.inputs_ahead import Begun
from shardwright_plugins.pipeline.status_word import exchange_statuses


@frozen(eq=False)
class CollectionCall:
    """A forward pass of a collection: its path in the model, and the path of its input in the batch."""

    name: str
    path: Path


class BatchExchange:
    """The exchanges of a batch, all under way together; :meth:`begin` and :meth:`send` are done once each.

    Args:
        env: the ranks of a sharding group.
        fetched: this rank's batch, or the reason why it has none.
        calls: the collections' calls whose ids are exchanged ahead.
        begin: function that starts the headers of a call.

    Attributes:
        begun: the exchange of each call, once their headers were started.
        error: the error of any rank's batch, or ``None``.
        statuses: status of each rank, ``[W]``.
        is_over: the data has ended.
    """

    def __init__(
        self,
        env: ShardingEnv,
        fetched: Fetched,
        calls: Sequence[CollectionCall],
        begin: Callable[[CollectionCall, Fetched], Begun],
    ) -> None:
        self._env, self._fetched = env, fetched
        self._calls, self._begin = calls, begin
        self._has_begun = self._is_sent = False
        self._sent: list[EngineStep] = []
        self.begun: list[Begun] = []
        self.error: Exception | None = None
        self.statuses: Sequence[Status] = ()

    def begin(self) -> None:
        """Start the headers of all collections."""
        if not self._has_begun:
            self._has_begun = True
            self.begun = [self._begin(call, self._fetched) for call in self._calls]

    def send(self) -> None:
        """Wait for all headers, and start the ids; errors of batches are kept in :attr:`error`.

        Raises:
            DistributedError: a collective failed.
        """
        self.begin()
        if self._is_sent:
            return
        self._is_sent = True
        self.error, self._sent = _send_all([begun.step for begun in self.begun])
        if self.begun and self._env.all_ranks is None:
            self.statuses = self.begun[0].step.statuses
            return
        # Headers have the statuses of a sharding group only.
        fetched, is_shared = self._fetched, self.error is not None
        self.statuses, self.error = exchange_statuses(
            self._env.everyone, fetched.status, self.error or fetched.error, is_shared=is_shared
        )

    @property
    def is_over(self) -> bool:
        """The data has ended on the ranks that say when."""
        return bool(self.statuses) and not goes_on(self.statuses)

    @property
    def goes_on(self) -> bool:
        """The batch's ids are under way, and are to be looked up."""
        return self.error is None and not self.is_over

    def discard(self) -> None:
        """Wait for ids that nobody is going to look up."""
        for begun in self.begun:
            if begun.step in self._sent:
                begun.step.receive()
                begun.step.is_begun = False  # the error of another collection's batch may keep the step


def _send_all(steps: Sequence[EngineStep]) -> tuple[Exception | None, list[EngineStep]]:
    """Go on with all exchanges; return the first error, and the exchanges whose ids are under way."""
    first: Exception | None = None
    sent = []
    for step in steps:
        try:
            if step.send():
                sent.append(step)
        except Exception as error:
            if is_lost(error):
                raise
            first = first or error
    return first, sent


def agreed_calls(told: Sequence[Sequence[tuple[str, Path | None]]]) -> list[CollectionCall]:
    """Select the calls of collections that all ranks called in the same order, with inputs at the same places."""

    def calls_of(calls: Sequence[tuple[str, Path | None]], name: str) -> list[Path | None]:
        return [path for other, path in calls if other == name]

    names = {
        name
        for name, _ in told[0]
        if None not in calls_of(told[0], name)
        and all(calls_of(calls, name) == calls_of(told[0], name) for calls in told)
    }
    kept = [[call for call in calls if call[0] in names] for calls in told]
    if any(calls != kept[0] for calls in kept):
        return []
    return [CollectionCall(name, path) for name, path in kept[0] if path is not None]
