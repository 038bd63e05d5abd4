"""Hosts of unlike speed: a step waits for the slowest ranks, so constants are those of the slowest class of hosts.

Plans give the hosts of other classes as much more as they are faster.

Legend: H hosts, W ranks, E experiments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from shardwright.planning.arrays import Floats
from shardwright_plugins.commands.calibrate.kernels import KernelTimes

_ALIKE = 0.9
"""Hosts of one processor are of one class down to this part of its fastest host's speed."""


@frozen
class HostClass:
    """Hosts of one processor and about one speed.

    Args:
        processor: name of the processor.
        hosts: numbers of the hosts.
        speed: speed of lookups and updates, as a part of the fastest host's.
    """

    processor: str
    hosts: tuple[int, ...]
    speed: float

    def to_data(self) -> dict[str, Any]:
        """Return JSON data."""
        return {"processor": self.processor, "hosts": len(self.hosts), "speed": round(self.speed, 3)}


def host_classes(
    times: Mapping[str, Sequence[KernelTimes]], processors: Sequence[str], local_size: int
) -> list[HostClass]:
    """The classes of hosts, the fastest first.

    Args:
        times: kernel -> each rank's times: ``[W]``.
        processors: each rank's processor: ``[W]``.
        local_size: ranks of a host.
    """
    speeds, classes = _speeds(times, local_size), list[HostClass]()
    for host in np.argsort(-speeds, kind="stable").tolist():
        name = processors[host * local_size]
        # The slowest class of this processor; hosts of others may be between its fastest host and this one.
        last = next((own for own in reversed(classes) if own.processor == name), None)
        if last is not None and speeds[host] >= _ALIKE * speeds[last.hosts[0]]:
            hosts = (*last.hosts, host)
            classes[classes.index(last)] = evolve(
                last, hosts=hosts, speed=float(np.median(speeds[list(hosts)]))
            )
        else:
            classes.append(HostClass(name, (host,), float(speeds[host])))
    return classes


def speeds_of_ranks(classes: Sequence[HostClass], local_size: int) -> list[float]:
    """Speed of each rank as a part of the slowest class's: ``[W]``; none where all hosts are of one class."""
    slowest = min(own.speed for own in classes)
    speed_of = {host: round(own.speed / slowest, 3) for own in classes for host in own.hosts}
    of_hosts = [speed_of[host] for host in sorted(speed_of)] if len(classes) > 1 else []
    return [speed for speed in of_hosts for _ in range(local_size)]


def _speeds(times: Mapping[str, Sequence[KernelTimes]], local_size: int) -> Floats:
    """Speed of each host as a part of the fastest one's, the median over experiments: ``[H]``."""
    of_ranks = np.array(
        [
            np.concatenate([one.lookup_ms + one.update_ms for one in own])
            for own in zip(*times.values(), strict=True)
        ]
    )
    of_hosts = of_ranks.reshape(-1, local_size, of_ranks.shape[1]).mean(axis=1)
    fastest = of_hosts[np.median(of_hosts / of_hosts[0], axis=1).argmin()]
    speeds: Floats = np.median(fastest / of_hosts, axis=1)
    return speeds


def mean_times(of_ranks: Sequence[KernelTimes], hosts: Sequence[int], local_size: int) -> KernelTimes:
    """The mean times over the ranks of some hosts.

    Args:
        of_ranks: each rank's times of one kernel: ``[W]``.
        hosts: numbers of the hosts.
        local_size: ranks of a host.
    """
    chosen = [own for rank, own in enumerate(of_ranks) if rank // local_size in hosts]
    return evolve(
        chosen[0],
        lookup_ms=np.mean([own.lookup_ms for own in chosen], axis=0),
        update_ms=np.mean([own.update_ms for own in chosen], axis=0),
    )
