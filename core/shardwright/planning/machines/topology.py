"""The machines: ranks, hosts, memory tiers and links, all by name.

Capacities and bandwidths are per rank, bandwidths in bytes per millisecond (as in TorchRec, and as costs are
in milliseconds). What was not given is assumed, listed as such in the report and in the plan document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import attrs
import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from shardwright.arguments import NonNegativeFloat, PositiveFloat, PositiveInt, Within, checked, whole
from shardwright.errors import PluginLoadError, UnknownNameError, UnsupportedError, nearest
from shardwright.host.extensions import ask_at
from shardwright.host.process import process_host
from shardwright.planning.arrays import Ints
from shardwright.planning.assumptions import CPU_DEVICE, GIB, InputValue
from shardwright.planning.documents.limits import MOST_RANKS
from shardwright.planning.machines.given import (
    CPU_TIER,
    MemoryBytes,
    Speed,
    attributes,
    bytes_of_ranks,
    compact,
    tiers_of,
)
from shardwright.planning.machines.replicas import Replicas

__all__ = ["CPU_DEVICE", "GIB", "InputValue", "Topology"]


@frozen(init=False, hash=False)
class Topology:
    """The ranks a model is to be sharded over.

    The arguments bear TorchRec's names; inside, tiers and links are names, and others than these can be
    added.

    Args:
        world_size: number of ranks.
        compute_device: type of the ranks' devices (``"cpu"``, ``"cuda"``, or what a comm backend declares), or a list
            of one a rank. Of two types one is ``"cpu"``, and ranks of one type are neighbours, on one host or on hosts
            of their own. Ranks on a CPU then have no memory tiers but ``"cpu_ddr"``, which only they have.
        local_world_size: ranks of one host; all of them by default.
        hbm_cap: bytes of each rank's device memory (one number, or one a rank).
        ddr_cap: bytes of host memory a rank may use (one number, or one a rank); of ranks on a CPU all they have.
        hbm_mem_bw: bandwidth of device memory, bytes/ms.
        ddr_mem_bw: bandwidth of host memory, bytes/ms.
        intra_host_bw: bandwidth between ranks of one host, bytes/ms.
        inter_host_bw: bandwidth between hosts, bytes/ms.
        hbm_to_ddr_mem_bw: bandwidth at which devices read the host's memory, bytes/ms: the link ``hbm_to_ddr``.
        memory_bytes: capacities of further tiers by name, bytes per rank.
        memory_bandwidths: bandwidths of further tiers by name, bytes/ms.
        link_bandwidths: bandwidths of further links by name, bytes/ms.
        link_latencies_ms: milliseconds that a collective with next to nothing to carry takes, by link
            (``"intra_host"``, ``"inter_host"``, or a further one).
        replicas: the other sharding groups that have the same shards, where these ranks are one of several; see
            :meth:`sharding_group`.
        speed: speed of lookups and updates, as a part of that of the machine that costs are of (one number, or one a
            rank); 1 by default. What travels between ranks takes as long on each.
        detected: names of the arguments that were read from the machine, not given by the user.

    Raises:
        InvalidInputError: a size is not positive, ranks do not divide into hosts, or devices are mixed in another way.
        UnknownNameError: no such device is known; the text has the known and the nearest.

    Example:
        >>> import shardwright as sw
        >>> topology = sw.Topology(world_size=16, compute_device="cuda", local_world_size=8, hbm_cap=80 * 1024**3)
        >>> topology.num_hosts, topology.tiers
        (2, ('hbm', 'ddr'))
        >>> mixed = sw.Topology(3, ["cuda", "cuda", "cpu"], hbm_cap=80 * 1024**3, ddr_cap=256 * 1024**3)
        >>> mixed.tiers, mixed.ranks_of("cpu")
        (('hbm', 'ddr', 'cpu_ddr'), range(2, 3))
    """

    world_size: int
    compute_devices: tuple[str, ...] = field(
        repr=lambda devices: repr(devices[0] if len(set(devices)) == 1 else devices)
    )
    local_world_size: int
    memory_bytes: Mapping[str, tuple[int, ...]]
    memory_bandwidths: Mapping[str, float]
    link_bandwidths: Mapping[str, float]
    link_latencies_ms: Mapping[str, float]
    replicas: Replicas | None
    speeds: tuple[float, ...] = field(repr=lambda speeds: repr(compact(speeds)))
    provenance: Mapping[str, InputValue] = field(eq=False, repr=False)

    @checked
    def __init__(
        self,
        world_size: Annotated[int, Within(ge=1, le=MOST_RANKS)],
        compute_device: str | Sequence[str],
        hbm_cap: MemoryBytes | Sequence[MemoryBytes] | npt.NDArray[Any] | None = None,
        ddr_cap: MemoryBytes | Sequence[MemoryBytes] | npt.NDArray[Any] | None = None,
        local_world_size: PositiveInt | None = None,
        *,
        hbm_mem_bw: PositiveFloat | None = None,
        ddr_mem_bw: PositiveFloat | None = None,
        intra_host_bw: PositiveFloat | None = None,
        inter_host_bw: PositiveFloat | None = None,
        hbm_to_ddr_mem_bw: PositiveFloat | None = None,
        memory_bytes: Mapping[str, MemoryBytes | Sequence[MemoryBytes] | npt.NDArray[Any]] = MappingProxyType(
            {}
        ),
        memory_bandwidths: Mapping[str, PositiveFloat] = MappingProxyType({}),
        link_bandwidths: Mapping[str, PositiveFloat] = MappingProxyType({}),
        link_latencies_ms: Mapping[str, NonNegativeFloat] = MappingProxyType({}),
        replicas: Replicas | None = None,
        speed: Speed | Sequence[Speed] | npt.NDArray[Any] | None = None,
        detected: Sequence[str] = (),
    ) -> None:
        asked = {  # in the order of a plan document's inputs
            "world_size": whole(world_size),
            "compute_device": compute_device,
            "local_world_size": whole(local_world_size),
            "hbm_cap": hbm_cap,
            "ddr_cap": ddr_cap,
            "memory_bytes": memory_bytes,
            "hbm_mem_bw": hbm_mem_bw,
            "ddr_mem_bw": ddr_mem_bw,
            "intra_host_bw": intra_host_bw,
            "inter_host_bw": inter_host_bw,
            f"{CPU_TIER}_mem_bw": ddr_mem_bw,
            "hbm_to_ddr_mem_bw": hbm_to_ddr_mem_bw,
            "memory_bandwidths": memory_bandwidths,
            "link_bandwidths": link_bandwidths,
            "link_latencies_ms": link_latencies_ms,
            "replicas": replicas,
            "speed": speed,
        }
        self.__attrs_init__(**attributes(asked, detected), replicas=replicas)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Topology:
        """The topology that :meth:`to_data` described; what it leaves out is assumed.

        Raises:
            InvalidInputError: a value is wrong.
            UnknownNameError: no such device is known.
        """
        keys = ("memory_bytes", "memory_bandwidths_bytes_per_ms", "link_bandwidths_bytes_per_ms")
        memory, speeds, links = (dict(data.get(key, {})) for key in keys)
        if isinstance(data["compute_device"], list) and CPU_TIER in memory:
            both = (
                bytes_of_ranks(tier, memory.pop(tier, 0), data["world_size"]) for tier in ("ddr", CPU_TIER)
            )
            memory["ddr"] = [sum(pair) for pair in zip(*both, strict=True)]
        return cls(
            data["world_size"],
            data["compute_device"],
            hbm_cap=memory.pop("hbm", None),
            ddr_cap=memory.pop("ddr", None),
            local_world_size=data.get("local_world_size"),
            hbm_mem_bw=speeds.pop("hbm", None),
            ddr_mem_bw=speeds.pop("ddr", None),
            intra_host_bw=links.pop("intra_host", None),
            inter_host_bw=links.pop("inter_host", None),
            hbm_to_ddr_mem_bw=links.pop("hbm_to_ddr", None),
            memory_bytes=memory,
            memory_bandwidths=speeds,
            link_bandwidths=links,
            link_latencies_ms=dict(data.get("link_latencies_ms", {})),
            replicas=Replicas(**data["replicas"]) if data.get("replicas") else None,
            speed=data.get("speed"),
        )

    @classmethod
    def from_machine(
        cls, path: str | Path, world_size: int, compute_device: str = CPU_DEVICE, **given: Any
    ) -> Topology:
        """The topology of ranks on a machine that ``shardwright calibrate`` measured, by ``method:machine``.

        Args:
            path: machine document.
            world_size: number of ranks.
            compute_device: type of their devices: ``"cpu"``, or that of the accelerators whose memory and copies were
                measured; links between these are assumed.
            given: further arguments of :class:`Topology`, which count instead of what was measured. Values that were
                measured with another number of ranks count as assumed, and of unlike ranks the speed of the slowest.

        Raises:
            InvalidInputError: the document is malformed, an argument is wrong, or the devices are others.
            UnknownPluginError: no plugin that reads such documents is loaded.
        """
        return _brought("machine", world_size, path, world_size, compute_device, **given)

    @checked
    def sharding_group(
        self,
        sharding_group_size: PositiveInt,
        *,
        sync_every: PositiveInt = 1,
        use_inter_host_allreduce: bool = False,
        node_group_size: PositiveInt | None = None,
    ) -> Topology:
        """The topology of one sharding group, where these ranks are several with a replica of each table.

        Plans for models with sharding groups are made for it. Of memory, each of its ranks has what the least
        of its replicas has. The extension ``method:sharding_group`` makes it.

        Args:
            sharding_group_size: ranks of a group; tables are sharded over so many.
            sync_every: steps from one averaging of the replicas to the next.
            use_inter_host_allreduce: groups are neighbouring ranks, so that replicas are averaged between hosts; else
                replicas are neighbours.
            node_group_size: ranks of a group that count as one host; by default as many as are on one.

        Raises:
            InvalidInputError: the ranks do not divide into such groups, or a group not into such hosts.
            UnknownPluginError: no plugin that makes such groups is loaded.

        Example:
            >>> group = Topology(64, "cuda", local_world_size=8).sharding_group(16, use_inter_host_allreduce=True)
            >>> group.world_size, group.local_world_size, group.replicas.num_groups
            (16, 8, 4)
        """
        return _brought(
            "sharding_group",
            sharding_group_size,
            self,
            whole(sharding_group_size),
            sync_every=sync_every,
            use_inter_host_allreduce=use_inter_host_allreduce,
            node_group_size=node_group_size,
        )

    def evolved(self, **changed: Any) -> Topology:
        """Copy with other values of attributes."""
        copied = object.__new__(Topology)
        copied.__attrs_init__(**{**attrs.asdict(self, recurse=False), **changed})
        return copied

    @property
    def num_hosts(self) -> int:
        """Number of hosts that the ranks are on."""
        return self.world_size // self.local_world_size

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the memory tiers, the device's own first."""
        return tuple(self.memory_bytes)

    @cached_property
    def device_types(self) -> tuple[str, ...]:
        """The types of the ranks' devices, each once, in the order of the ranks."""
        return tuple(dict.fromkeys(self.compute_devices))

    @property
    def is_mixed(self) -> bool:
        """True if some ranks have a device and others a CPU."""
        return len(self.device_types) > 1

    @property
    def compute_device(self) -> str:
        """The type of all ranks' devices.

        Raises:
            UnsupportedError: ranks have different ones; who asks has to say which rank is meant.
        """
        if self.is_mixed:
            raise UnsupportedError(
                f"the ranks of this topology have several types of devices, {' and '.join(self.device_types)}: ask for "
                "compute_devices, one a rank, or name the device"
            )
        return self.compute_devices[0]

    def ranks_of(self, device: str) -> range:
        """The ranks whose device is of a type; they are neighbours."""
        first = self.compute_devices.index(device)
        return range(first, first + self.compute_devices.count(device))

    @cached_property
    def classes(self) -> tuple[Topology, ...]:
        """The ranks once for each class of ranks of one speed, ``C`` in all, as if all had that speed."""
        speeds = dict.fromkeys(self.speeds)
        if len(speeds) == 1:
            return (self,)
        return tuple(self.evolved(speeds=(speed,) * self.world_size) for speed in speeds)

    @cached_property
    def rank_class(self) -> Ints:
        """The class of each rank, the place of its speed in :attr:`classes`: ``[W]``."""
        number = {speed: index for index, speed in enumerate(dict.fromkeys(self.speeds))}
        return np.array([number[speed] for speed in self.speeds], dtype=np.int64)

    @property
    def speed(self) -> float:
        """Speed of the slowest ranks; that of all in a topology of :attr:`classes`."""
        return min(self.speeds)

    @property
    def device_tiers(self) -> tuple[str, ...]:
        """The tier that is each rank's device's own memory: ``W``."""
        own = {device: self.tier_of("device", device) for device in self.device_types}
        return tuple(own[device] for device in self.compute_devices)

    @property
    def capacity_bytes(self) -> Ints:
        """Bytes each rank has of each tier: ``[W, M]``."""
        return np.array([self.memory_bytes[tier] for tier in self.tiers], dtype=np.int64).T

    def tier_of(self, kernel_tier: str, device: str | None = None) -> str:
        """The tier of this topology that a compute kernel calls ``"device"``, ``"host"`` or by its own name.

        Args:
            kernel_tier: the kernel's name of it.
            device: type of the device that the kernel runs on; all ranks' by default.

        Raises:
            UnknownNameError: there is no such tier.
            UnsupportedError: ranks have different devices, and none is named.
        """
        device = self.compute_device if device is None else device
        is_apart = self.is_mixed and device == CPU_DEVICE  # whose memory no other rank has
        names = {
            "device": CPU_TIER if is_apart else tiers_of(device)[0],
            "host": CPU_TIER if is_apart else "ddr",
        }
        own = names.get(kernel_tier, kernel_tier)
        if own not in self.memory_bytes:
            raise UnknownNameError(
                f"this topology has no memory tier {own!r}. Known: {', '.join(self.tiers)}.{nearest(own, self.tiers)} "
                f"Give its capacity and bandwidth: Topology(..., memory_bytes={{{own!r}: bytes of a rank}}, "
                f"memory_bandwidths={{{own!r}: bytes per millisecond}})."
            )
        return own

    def read_bandwidth(self, kernel_tier: str, device: str | None = None) -> float:
        """Bytes per millisecond at which a rank's device reads a tier, named as for :meth:`tier_of`.

        A tier that is not the device's own is read through the link that bears both their names (``hbm_to_ddr``), if
        there is one. Ranks of another speed than 1 read at that part of it.

        Args:
            kernel_tier: a kernel's name of the tier.
            device: type of the device that reads; all ranks' by default.

        Raises:
            UnknownNameError: there is no such tier, or nothing says how fast it is.
            UnsupportedError: ranks have different devices, and none is named.
        """
        tier = self.tier_of(kernel_tier, device)
        link = self.link_bandwidths.get(f"{self.tier_of('device', device)}_to_{tier}")
        speed = self.memory_bandwidths.get(tier) if link is None else link
        if speed is None:
            raise UnknownNameError(
                f"the bandwidth of memory tier {tier!r} is not known. "
                f"Give it: Topology(..., memory_bandwidths={{{tier!r}: bytes per millisecond}})."
            )
        return speed * self.speed

    def link_between(self, num_ranks: int) -> str:
        """The slowest link in a collective over ``num_ranks`` neighbouring ranks."""
        return "intra_host" if num_ranks <= self.local_world_size else "inter_host"

    def host_of(self, rank: int) -> int:
        """The host that ``rank`` is on."""
        return rank // self.local_world_size

    def to_data(self) -> dict[str, Any]:
        """Return JSON data."""
        replicas = {} if self.replicas is None else {"replicas": attrs.asdict(self.replicas)}
        return {
            "world_size": self.world_size,
            "local_world_size": self.local_world_size,
            "compute_device": list(self.compute_devices) if self.is_mixed else self.compute_device,
            "memory_bytes": {tier: compact(values) for tier, values in self.memory_bytes.items()},
            "memory_bandwidths_bytes_per_ms": dict(self.memory_bandwidths),
            "link_bandwidths_bytes_per_ms": dict(self.link_bandwidths),
            "link_latencies_ms": dict(self.link_latencies_ms),
            **replicas,
            **({} if set(self.speeds) == {1.0} else {"speed": compact(self.speeds)}),
        }


def _brought(word: str, world_size: int, *args: Any, **kwargs: Any) -> Topology:
    """A topology of so many ranks that an extension at ``method`` makes.

    Raises:
        PluginLoadError: it gives something else, or a topology of another size.
    """
    offered = process_host().extensions
    made: Topology = ask_at("method", word, offered, Topology, *args, **kwargs)
    if made.world_size != world_size:
        raise PluginLoadError(
            f"'method:{word}' of plugin {offered.entry(f'method:{word}').provenance} broke its contract: asked for a "
            f"topology of {world_size} ranks, it gave one of {made.world_size}"
        )
    return made
