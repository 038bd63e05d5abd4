"""Host memory that this process may use: what the machine has, or a control group lets it have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""File of a group's limit, by the controller that ``/proc/self/cgroup`` names: none in version 2 of control groups."""


def host_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory; ``None`` where the system does not say.

    Args:
        root: the folder that ``proc`` and ``sys`` are in, which tell the limits of control groups.
    """
    found = list(_limits(root))
    with suppress(ValueError, OSError, AttributeError):  # a system that does not say
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found, default=None)


def _limits(root: Path) -> Iterator[int]:
    """The limits of this process's control groups and of those around them."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in _LIMITS.keys() & set(controllers.split(",")):
                mount = root / "sys/fs/cgroup" / controller
                own = mount / path.strip("/")
                # In a container the group may stand at the mount itself.
                for folder in (own, *own.parents[: len(own.relative_to(mount).parts)]):
                    with suppress(OSError, ValueError):  # "max": no limit
                        yield int((folder / _LIMITS[controller]).read_text())
