"""Meetings before calls of a collection that every rank must make; ranks meet without a collective."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen

from shardwright.runtime.ranks.environment import ShardingEnv


@frozen(eq=False)
class Meeting:
    """The meeting of the ranks before the state of one collection is saved or loaded.

    Args:
        env: the ranks.
        collection: name of the collection, for errors.
        before_gathering: functions called when all have met to gather tables.
    """

    env: ShardingEnv
    collection: str
    before_gathering: list[Callable[[], None]] = field(factory=list)

    def to_gather(self, what: str) -> None:
        """Wait until every rank calls ``what``, which gathers tables.

        Raises:
            DistributedError: a rank does not call it within the time-out.
        """
        self.to_load(what)
        for call in self.before_gathering:
            call()

    def to_load(self, what: str) -> None:
        """Wait until every rank calls ``what``, because otherwise replicas would differ from rank to rank.

        Raises:
            DistributedError: a rank does not call it within the time-out.
        """
        self.env.agree(f"{what} of {self.collection}")
