"""Observation of other processes of this host: which have ended."""

from __future__ import annotations

import os
import select
import weakref
from pathlib import Path

from attrs import define, field


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
        # Not at exit, when other threads may still look: what is closed would read as a process that has ended.
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        if self._descriptor >= 0:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            return bool(poll.poll(0))
        return not os.path.exists(f"/proc/{self.number}")
