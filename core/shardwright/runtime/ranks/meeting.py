"""Meetings before calls of a collection that every rank must make; ranks meet in the store, without a collective."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen

from shardwright.runtime.ranks.environment import ShardingEnv


@frozen(eq=False)
class Meeting:
    """The meeting of the ranks before the state of one collection is saved or loaded.

    Args:
        env: the ranks.
        number: number of the collection, as in :class:`shardwright.runtime.ranks.lockstep.Lockstep`.
        before_gathering: functions called when all have met to gather tables.
    """

    env: ShardingEnv
    number: int
    before_gathering: list[Callable[[], None]] = field(factory=list)

    def to_gather(self, what: str) -> None:
        """Wait until every rank calls ``what``, which gathers tables.

        Raises:
            DistributedError: a rank does not call it within the time-out.
        """
        self._meet(what, "gathers tables")
        for call in self.before_gathering:
            call()

    def to_load(self, what: str) -> None:
        """Wait until every rank calls ``what``, because otherwise replicas would differ from rank to rank.

        Raises:
            DistributedError: a rank does not call it within the time-out.
        """
        self._meet(what, "changes the parts and copies that all ranks have")

    def _meet(self, what: str, why: str) -> None:
        lockstep = self.env.lockstep
        name = lockstep.name(self.number)
        told = f"{what} of {name}, which {why} and so is to be called on every rank,"
        self.env.communicator.meet(lockstep.place(f"gathering/{self.number}"), told)
