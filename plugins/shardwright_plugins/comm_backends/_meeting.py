"""Discovery of ranks that share memory: all of a process group do, or none.

A rank writes a random word into memory, and its host, process, descriptor and the word into the group's store. Ranks of
one host and process namespace can map any memory of each other's, unless they are of different users. A rank that finds
another word there is on another host, which only looks like this one: a machine's copy, or a sandbox without a name.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from attrs import define, field

from shardwright.runtime.ranks.group_store import GroupStore
from shardwright_plugins.comm_backends._segments import Segment

NOTHING = "none"
"""Answer of a rank that has nothing to offer."""
OFFER = "offer"
"""Name of the text that a rank tells first."""


@define(eq=False)
class Peer:
    """Another rank, whose segments this rank maps.

    Args:
        process: the peer's.
        rank: this rank's.
        world_size: ranks of the group.
        rings: the peer's segment of messages.
    """

    process: int
    rank: int
    world_size: int
    rings: Segment
    _mapped: dict[int, Segment] = field(factory=dict)

    def segment(self, descriptor: int, serial: int, oldest: int, size: int) -> Segment:
        """One of the peer's segments of large pieces.

        Args:
            descriptor: the peer's.
            serial: the peer's number of it.
            oldest: the lowest number that the peer still uses.
            size: bytes of its room.

        Raises:
            RuntimeError: the peer is gone.
        """
        segment = self._mapped.get(serial)
        if segment is None:
            self._mapped = {known: own for known, own in self._mapped.items() if known >= oldest}
            try:
                segment = Segment.open(
                    self.process, descriptor, size, serial=serial, num_peers=self.world_size
                )
            except (OSError, ValueError) as error:
                raise RuntimeError(f"the memory of process {self.process} is gone: {error}") from error
            self._mapped[serial] = segment
        return segment


class Meeting:
    """This rank among those of a process group.

    Args:
        process_group: every rank of it makes one of these, and tells as much by it; or says :data:`NOTHING` at once.
        store: store of the group.
    """

    def __init__(self, process_group: Any, store: GroupStore) -> None:
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._store = store
        # This rank's connections to the group are counted: keys of earlier ones are told from these.
        self._number = store.add(f"shardwright/memory/connected/{self.rank}", 1, math.inf)

    def tell_all(self, what: str, mine: str, deadline: float) -> list[str]:
        """Exchange a text with all ranks; a rank that says :data:`NOTHING` does not wait for the others.

        Args:
            what: its name.
            mine: this rank's.
            deadline: latest end, on the monotonic clock, s.

        Returns:
            The text of each rank; this rank's alone if it is :data:`NOTHING`.

        Raises:
            RuntimeError: a rank or the store did not answer in time.
        """
        keys = [f"shardwright/memory/{self._number}/{what}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], mine, deadline)
        return [mine] if mine == NOTHING else self._store.read(keys, deadline)
