"""Whether the processes of other ranks live, as far as they are on this host."""

from __future__ import annotations

import os
import select
import weakref
from pathlib import Path
from typing import Any

from attrs import define, field


def this_host() -> str:
    """What processes have in common that see each other; nothing where that is not known.

    Raises:
        OSError: this is no Linux.
    """
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


@define(eq=False)
class Process:
    """A process of this host.

    Args:
        number: its number.
    """

    number: int
    _descriptor: int = field(default=-1)

    def __attrs_post_init__(self) -> None:
        try:
            self._descriptor = os.pidfd_open(self.number)
        except (AttributeError, OSError):  # an old kernel, or one that does not let us
            return
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        if self._descriptor >= 0:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            return bool(poll.poll(0))
        return not os.path.exists(f"/proc/{self.number}")


class Neighbours:
    """The processes of a group's ranks, of which each says in the store where it is.

    Args:
        rank: this rank.
        world_size: ranks of the group.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._strangers = rank, {other for other in range(world_size) if other != rank}
        self._processes: dict[int, Process] = {}

    def introduce(self, store: Any) -> None:
        """Say where this process is."""
        try:
            store.set(_key(self._rank), f"{this_host()} {os.getpid()}")
        except OSError:  # no Linux: the others wait until time is up
            self._strangers.clear()

    def ended(self, store: Any) -> list[int]:
        """The ranks of this host whose processes have ended; those of which nothing is known yet are looked up."""
        for rank in [rank for rank in self._strangers if store.check([_key(rank)])]:
            self._strangers.discard(rank)
            host, _, number = store.get(_key(rank)).decode().rpartition(" ")
            if host == this_host():
                self._processes[rank] = Process(int(number))
        return [rank for rank, process in sorted(self._processes.items()) if process.has_ended]


def _key(rank: int) -> str:
    return f"shardwright/process/{rank}"
