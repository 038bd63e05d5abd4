"""Observation of the other ranks' processes on this host: which have ended."""

from __future__ import annotations

import os
import select
import weakref
from pathlib import Path
from typing import Any

from attrs import define, field

from shardwright.runtime.ranks.store_log import LogReader, write_line


def this_host() -> str:
    """Identify the host and PID namespace: the same text for processes that can see each other.

    Raises:
        OSError: the system is not Linux.
    """
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


@define(eq=False)
class Process:
    """A process of this host.

    Args:
        number: its process id.
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
        """True if the process has ended."""
        if self._descriptor >= 0:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            return bool(poll.poll(0))
        return not os.path.exists(f"/proc/{self.number}")


class Neighbours:
    """The processes of a group's ranks on this host; each writes its process id into the store.

    Args:
        rank: this rank.
        world_size: number of ranks of the group.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._log: LogReader | None = (
            None  # of this host; none before the introduction, or where there is none
        )
        self._processes: dict[int, Process] = {}

    def introduce(self, store: Any) -> None:
        """Write this process's id into the log of its host."""
        try:
            log = f"shardwright/processes/{this_host()}"
        except OSError:  # no Linux: the others wait until time is up
            return
        write_line(store, log, f"{self._rank} {os.getpid()}")
        self._log = LogReader(log)

    def ended(self, store: Any) -> list[int]:
        """Find the ranks of this host whose processes have ended, after reading newly written process ids."""
        if self._log is not None and len(self._processes) < self._world_size - 1:
            for line in self._log.read_on(store):
                rank, number = map(int, line.split())
                if rank != self._rank:
                    self._processes[rank] = Process(number)
        return [rank for rank, process in sorted(self._processes.items()) if process.has_ended]
