"""The contract of a partitioner: which rank each shard of a proposal goes to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from shardwright.contracts.names import OpenNames

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardwright.planning.search.placement import Misfit, ProposedShards


class Partitioner(ABC, metaclass=OpenNames):
    """Places the shards of a proposal on ranks.

    The planner calls ``place`` once for each proposal, on the one rank that plans, and checks what it gets: a
    shard that has a rank must keep it, the shards of a gang must be on ranks of one host, each with the rank inside
    it that it must have, if any, and no rank may hold more than it has of any memory tier. A partitioner holds no
    state between calls and is deterministic.
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    preference: ClassVar[int] = 0
    """Above 0: may be taken when none was asked for; the highest is."""

    @abstractmethod
    def place(self, shards: ProposedShards) -> npt.NDArray[np.int64] | Misfit:
        """The rank of each shard ``[N]``, or which shard did not fit, and where.

        Args:
            shards: columns over the ``N`` shards of the proposal that are to be placed: time, bytes per memory tier,
                the rank of those that are fixed, the gang of those that must share a host; the capacities of the
                ranks, and what they hold already of shards that their layout has put there.
        """
