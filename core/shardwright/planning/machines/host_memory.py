"""Host memory that this process may use: what the machine has, or a control group lets it have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""File of a group's limit, by the controller that ``/proc/self/cgroup`` names: none in version 2 of control groups."""


def host_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory; ``None`` where the system does not say.

    Args:
        root: the folder that ``proc`` and ``sys`` are in.
    """
    found = [*_of_machine(root), *_limits(root)]
    return min(found, default=None)


def _of_machine(root: Path) -> Iterator[int]:
    """The memory of the machine, as Linux tells it, or else as POSIX does."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        yield from (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except OSError:
        try:
            yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError, AttributeError):  # a system without these
            return


def _limits(root: Path) -> Iterator[int]:
    """The limits of this process's control groups and of those around them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _LIMITS:
                mount = root / "sys/fs/cgroup" / controller
                yield from _limits_of(mount, path.strip("/"), _LIMITS[controller])


def _limits_of(mount: Path, path: str, name: str) -> Iterator[int]:
    own = mount / path
    for folder in [own, *own.parents]:
        try:
            text = (folder / name).read_text().strip()
        except OSError:  # in a container the group may stand at the mount itself
            text = ""
        if text.isdecimal():  # else "max": no limit
            yield int(text)
        if folder == mount:
            return
