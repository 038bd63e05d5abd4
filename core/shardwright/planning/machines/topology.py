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

from shardwright.arguments import NonNegativeFloat, PositiveFloat, PositiveInt, Within, brief, checked, whole
from shardwright.errors import (
    InvalidInputError,
    PluginLoadError,
    UnknownNameError,
    UnsupportedError,
    nearest,
)
from shardwright.host.extensions import ask_at
from shardwright.host.process import process_host
from shardwright.planning.assumptions import CPU_DEVICE, GIB, InputValue, assumptions_of
from shardwright.planning.documents import MACHINE
from shardwright.planning.documents.limits import MOST_MEMORY_BYTES, MOST_RANKS, MOST_SPEED
from shardwright.planning.machines.replicas import Replicas

__all__ = ["CPU_DEVICE", "GIB", "InputValue", "Topology"]

_KNOWN_DEVICES = (CPU_DEVICE, "cuda")
_LINKS = ("intra_host", "inter_host")
_LATENCY = "_latency_ms"
CPU_TIER = "cpu_ddr"
"""Memory of the ranks on a CPU, in a topology with others on devices."""


MemoryBytes = Annotated[float, Within(ge=0, le=MOST_MEMORY_BYTES)]
Speed = Annotated[float, Within(ge=1 / MOST_SPEED, le=MOST_SPEED)]


def _tiers_of(device: str) -> tuple[str, ...]:
    return ("ddr",) if device == CPU_DEVICE else ("hbm", "ddr")


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
    speeds: tuple[float, ...] = field(repr=lambda speeds: repr(_compact(speeds)))
    provenance: Mapping[str, InputValue] = field(eq=False, repr=False)

    @checked
    def __init__(
        self,
        world_size: Annotated[int, Within(ge=1, le=MOST_RANKS)],
        compute_device: str | Sequence[str],
        hbm_cap: MemoryBytes | Sequence[MemoryBytes] | None = None,
        ddr_cap: MemoryBytes | Sequence[MemoryBytes] | None = None,
        local_world_size: PositiveInt | None = None,
        *,
        hbm_mem_bw: PositiveFloat | None = None,
        ddr_mem_bw: PositiveFloat | None = None,
        intra_host_bw: PositiveFloat | None = None,
        inter_host_bw: PositiveFloat | None = None,
        hbm_to_ddr_mem_bw: PositiveFloat | None = None,
        memory_bytes: Mapping[str, MemoryBytes | Sequence[MemoryBytes]] = MappingProxyType({}),
        memory_bandwidths: Mapping[str, PositiveFloat] = MappingProxyType({}),
        link_bandwidths: Mapping[str, PositiveFloat] = MappingProxyType({}),
        link_latencies_ms: Mapping[str, NonNegativeFloat] = MappingProxyType({}),
        replicas: Replicas | None = None,
        speed: Speed | Sequence[Speed] | None = None,
        detected: Sequence[str] = (),
    ) -> None:
        world_size, local_world_size = whole(world_size), whole(local_world_size)
        devices = _devices_of_ranks(compute_device, world_size)
        local = world_size if local_world_size is None else local_world_size
        _check_hosts(world_size, local)
        _check_mixed(devices, local)
        own, is_mixed = device_and_rest(devices)
        given = _Given(tuple(detected), assumptions_of(own, with_cpus=is_mixed))
        given.note("world_size", world_size)
        given.note("compute_device", compute_device)
        given.choose(
            "local_world_size", local_world_size, InputValue(world_size, "assumed", "all ranks on one host")
        )
        _check_of_device(own, hbm_cap=hbm_cap, hbm_mem_bw=hbm_mem_bw, hbm_to_ddr_mem_bw=hbm_to_ddr_mem_bw)
        caps, bandwidths = {"hbm": hbm_cap, "ddr": ddr_cap}, {"hbm": hbm_mem_bw, "ddr": ddr_mem_bw}
        tiers = _tiers_of(own)
        capacities = {
            tier: _per_rank(f"{tier}_cap", given.choose(f"{tier}_cap", caps[tier]), world_size)
            for tier in tiers
        }
        if is_mixed:
            _check_parted(devices, memory_bytes, hbm_cap)
            capacities = _parted(capacities, devices)
        for tier, value in memory_bytes.items():
            given.note(f"memory_bytes.{tier}", value)
            capacities[tier] = _per_rank(f"memory_bytes[{tier!r}]", value, world_size)
        speeds = {tier: given.choose(f"{tier}_mem_bw", bandwidths[tier]) for tier in tiers}
        links = {
            "intra_host": given.choose("intra_host_bw", intra_host_bw),
            "inter_host": given.choose("inter_host_bw", inter_host_bw),
        }
        if is_mixed:
            speeds[CPU_TIER] = given.choose("cpu_ddr_mem_bw", ddr_mem_bw)
        if own != CPU_DEVICE:
            links["hbm_to_ddr"] = given.choose("hbm_to_ddr_mem_bw", hbm_to_ddr_mem_bw)
        speeds.update(given.note_all("memory_bandwidths", memory_bandwidths))
        links.update(given.note_all("link_bandwidths", link_bandwidths))
        latencies = {
            link: given.choose(f"{link}_latency_ms", link_latencies_ms.get(link))
            for link in (*_LINKS, *(link for link in link_latencies_ms if link not in _LINKS))
        }
        if replicas is not None:
            given.note("replicas", attrs.asdict(replicas))
        if speed is not None:
            given.note("speed", speed)
        self.__attrs_init__(
            world_size=world_size,
            compute_devices=devices,
            local_world_size=local,
            memory_bytes=capacities,
            memory_bandwidths=speeds,
            link_bandwidths=links,
            link_latencies_ms=latencies,
            replicas=replicas,
            speeds=tuple(map(float, _one_a_rank("speed", 1.0 if speed is None else speed, world_size))),
            provenance=given.values,
        )

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Topology:
        """The topology that :meth:`to_data` described; what it leaves out is assumed.

        Raises:
            InvalidInputError: a value is wrong.
            UnknownNameError: no such device is known.
        """
        memory = dict(data.get("memory_bytes", {}))
        if isinstance(data["compute_device"], list) and CPU_TIER in memory:
            both = (_per_rank(tier, memory.pop(tier, 0), data["world_size"]) for tier in ("ddr", CPU_TIER))
            memory["ddr"] = [sum(pair) for pair in zip(*both, strict=True)]
        speeds = dict(data.get("memory_bandwidths_bytes_per_ms", {}))
        links = dict(data.get("link_bandwidths_bytes_per_ms", {}))
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
        """The topology of ranks on a machine that ``shardwright calibrate`` measured.

        Args:
            path: machine document.
            world_size: number of ranks.
            compute_device: type of their devices: ``"cpu"``, or that of the accelerators whose memory and copies were
                measured; links between these are assumed.
            given: further arguments of :class:`Topology`, which count instead of what was measured. Values that were
                measured with another number of ranks count as assumed, and of unlike ranks the speed of the slowest.

        Raises:
            InvalidInputError: the document is malformed, an argument is wrong, or the devices are others.
        """
        data = MACHINE.read(Path(path))
        try:
            MACHINE.check(data)
            _one_a_rank("topology.speed", data["topology"].get("speed", 1.0), data["made"]["ranks"])
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from error
        made, devices = data["made"], {*np.atleast_1d(compute_device).tolist()}
        known = {CPU_DEVICE, made.get("device", CPU_DEVICE)}
        if len(devices) > 1 or devices - known:
            raise InvalidInputError(
                f"{path} was measured on CPUs, whose links and memory are not those of {brief(compute_device)}: plan "
                f"without it, or for ranks of {' or '.join(sorted(known))}",
                subject="compute_device",
                asked=compute_device,
                possible=tuple(sorted(known)),
            )
        # Of an accelerator its memory and copies are measured, and no links between ranks. Speeds are of these ranks.
        is_host, is_as_many = devices == {CPU_DEVICE}, made["ranks"] == world_size
        measured = {
            name: value if is_as_many or name != "speed" else 1.0
            for name, value in data["topology"].items()
            if name.startswith("hbm_") != is_host
        }
        own = {name: value for name, value in given.items() if value is not None}
        latencies = {
            name.removesuffix(_LATENCY): measured[name] for name in measured if name.endswith(_LATENCY)
        } | own.pop("link_latencies_ms", {})
        arguments = {name: value for name, value in measured.items() if not name.endswith(_LATENCY)} | own
        topology = cls(world_size, compute_device, link_latencies_ms=latencies, **arguments)
        others = "" if is_as_many else f", not {world_size}"
        source = f"measured on {made['processor']}, {made['date']}, with {made['ranks']} ranks{others}"
        noted = {
            name: InputValue(value, "measured" if is_as_many else "assumed", source)
            for name, value in measured.items()
            if topology.provenance[name].value == value
        }
        return topology.evolved(provenance={**topology.provenance, **noted})

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
        at, offered = ("method", "sharding_group"), process_host().extensions
        made: Topology = ask_at(
            *at,
            offered,
            Topology,
            self,
            whole(sharding_group_size),
            sync_every=sync_every,
            use_inter_host_allreduce=use_inter_host_allreduce,
            node_group_size=node_group_size,
        )
        if made.world_size != sharding_group_size:
            raise PluginLoadError(
                f"{':'.join(at)!r} of plugin {offered.entry(':'.join(at)).provenance} broke its contract: asked for a "
                f"group of {sharding_group_size} ranks, it gave a topology of {made.world_size}"
            )
        return made

    def evolved(self, **changed: Any) -> Topology:
        """Copy with other values of attributes."""
        own = {attribute.name: getattr(self, attribute.name) for attribute in attrs.fields(Topology)}
        copied = object.__new__(Topology)
        copied.__attrs_init__(**{**own, **changed})
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

    def of_device(self, device: str) -> Topology:
        """The ranks whose device is of a type, by themselves, for tables whose shards stay on them."""
        if not self.is_mixed:
            return self
        ranks = self.ranks_of(device)
        kept = {tier: own for tier in _tiers_of(device) for own in [_own_name(tier, device)]}
        return self.evolved(
            world_size=len(ranks),
            compute_devices=(device,) * len(ranks),
            local_world_size=min(self.local_world_size, len(ranks)),
            memory_bytes={
                tier: self.memory_bytes[own][ranks.start : ranks.stop] for tier, own in kept.items()
            },
            memory_bandwidths={tier: self.memory_bandwidths[own] for tier, own in kept.items()},
            replicas=None,
            speeds=self.speeds[ranks.start : ranks.stop],
        )

    @cached_property
    def classes(self) -> tuple[Topology, ...]:
        """The ranks once for each class of ranks of one speed, ``C`` in all, as if all had that speed."""
        speeds = dict.fromkeys(self.speeds)
        if len(speeds) == 1:
            return (self,)
        return tuple(self.evolved(speeds=(speed,) * self.world_size) for speed in speeds)

    @cached_property
    def rank_class(self) -> npt.NDArray[np.int64]:
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
    def capacity_bytes(self) -> npt.NDArray[np.int64]:
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
        names = {"device": _tiers_of(device)[0], "host": "ddr"}
        own = names.get(kernel_tier, kernel_tier)
        if self.is_mixed and kernel_tier in names:
            own = _own_name(own, device)
        if own not in self.memory_bytes:
            raise UnknownNameError(
                f"this topology has no memory tier {own!r}. "
                f"Known: {', '.join(self.tiers)}.{nearest(own, self.tiers)} "
                f"Give its capacity: Topology(..., memory_bytes={{{own!r}: ...}})."
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
            "memory_bytes": {tier: _compact(values) for tier, values in self.memory_bytes.items()},
            "memory_bandwidths_bytes_per_ms": dict(self.memory_bandwidths),
            "link_bandwidths_bytes_per_ms": dict(self.link_bandwidths),
            "link_latencies_ms": dict(self.link_latencies_ms),
            **replicas,
            **({} if set(self.speeds) == {1.0} else {"speed": _compact(self.speeds)}),
        }


class _Given:
    """Collects values with where they came from."""

    def __init__(self, detected: tuple[str, ...], assumptions: Mapping[str, InputValue]) -> None:
        self.values: dict[str, InputValue] = {}
        self._detected = detected
        self._assumptions = assumptions

    def note(self, name: str, value: Any) -> None:
        plain = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        self.values[name] = InputValue(plain, "detected" if name in self._detected else "given")

    def note_all(self, name: str, values: Mapping[str, float]) -> Mapping[str, float]:
        for key, value in values.items():
            self.note(f"{name}.{key}", value)
        return values

    def choose(self, name: str, value: Any, assumed: InputValue | None = None) -> Any:
        if value is None:
            self.values[name] = assumed or self._assumptions[name]
            return self.values[name].value
        self.note(name, value)
        return value


def device_and_rest(devices: Sequence[str]) -> tuple[str, bool]:
    """The type of ranks' devices, the CPU's only where there is no other, and whether other ranks have a CPU."""
    own = [device for device in dict.fromkeys(devices) if device != CPU_DEVICE]
    return (own or [CPU_DEVICE])[0], bool(own) and CPU_DEVICE in devices


def _own_name(tier: str, device: str) -> str:
    """The name in a mixed topology of a tier of a device's ranks: none has those of others."""
    return CPU_TIER if device == CPU_DEVICE else tier


def _check_parted(devices: Sequence[str], memory_bytes: Mapping[str, Any], hbm_cap: Any) -> None:
    """Check that no memory is given to ranks that do not have it."""
    if CPU_TIER in memory_bytes:
        raise InvalidInputError(
            f"the memory of ranks on a CPU, {CPU_TIER!r}, is given by ddr_cap, one number a rank"
        )
    for rank, value in enumerate(hbm_cap if isinstance(hbm_cap, list | tuple) else ()):
        if value and devices[rank] == CPU_DEVICE:
            raise InvalidInputError(
                f"hbm_cap is {value!r} for rank {rank}, which has no device; give 0 there"
            )


def _parted(capacities: Mapping[str, tuple[int, ...]], devices: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Part the memory of ranks with a device from that of ranks on a CPU, whose tier is another."""
    is_cpu = [device == CPU_DEVICE for device in devices]
    kept = {
        tier: tuple(0 if cpu else value for value, cpu in zip(values, is_cpu, strict=True))
        for tier, values in capacities.items()
    }
    own = tuple(value if cpu else 0 for value, cpu in zip(capacities["ddr"], is_cpu, strict=True))
    return {**kept, CPU_TIER: own}


def _devices_of_ranks(given: str | Sequence[str], world_size: int) -> tuple[str, ...]:
    """The type of each rank's device: one for all, or one a rank."""
    devices = (given,) * world_size if isinstance(given, str) else tuple(given)
    if len(devices) != world_size:
        raise InvalidInputError(
            f"compute_device has {len(devices)} devices for {world_size} ranks: give one for all, or one a rank"
        )
    for device in dict.fromkeys(devices):
        _check_device(device)
    return devices


def _check_mixed(devices: Sequence[str], local_world_size: int) -> None:
    """Check that ranks of one device are neighbours, on one host or on hosts of their own, and others are on CPUs."""
    starts = [index for index in range(1, len(devices)) if devices[index] != devices[index - 1]]
    if not starts:
        return
    shown = ", ".join(f"{devices[index]!r} from rank {index}" for index in [0, *starts])
    if len(starts) > 1 or CPU_DEVICE not in devices:
        raise InvalidInputError(
            f"devices of ranks can be mixed if all of one type are neighbours and of two types one is {CPU_DEVICE!r}; "
            f"these are {shown}. Order the ranks by device."
        )
    if local_world_size < len(devices) and starts[0] % local_world_size:
        raise InvalidInputError(
            f"on several hosts, each has one type of device; these are {shown}, with {local_world_size} ranks a host"
        )


def _check_device(device: str) -> None:
    """Check that a device type can be planned for: host, CUDA, or what a loaded comm backend declares."""
    if device in _KNOWN_DEVICES:
        return
    backends = process_host().comm_backends
    declared = [one for name in backends.names for one in backends[name].devices]
    known = sorted({*_KNOWN_DEVICES, *declared})
    if device not in known:
        near = nearest(str(device), known)
        raise UnknownNameError(f"no compute_device {device!r}. Known: {', '.join(known)}.{near}")


def _check_hosts(world_size: int, local_world_size: int) -> None:
    if world_size % local_world_size:
        raise InvalidInputError(
            f"{world_size} ranks do not divide into hosts of {local_world_size} (local_world_size); "
            f"{world_size % local_world_size} would be left over"
        )


def _check_of_device(device: str, **given: Any) -> None:
    """Check that nothing was said of device memory where the device has none."""
    wrong = {name: value for name, value in given.items() if value is not None}
    if device == CPU_DEVICE and wrong:
        said = " and ".join(f"{name}={value}" for name, value in wrong.items())
        raise InvalidInputError(
            f"{said} given, but {device!r} has host memory only; give ddr_cap and ddr_mem_bw"
        )


def _one_a_rank(name: str, value: Any, world_size: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * world_size
    if len(values) != world_size:
        raise InvalidInputError(f"{name} has {len(values)} values for {world_size} ranks")
    return values


def _per_rank(name: str, value: Any, world_size: int) -> tuple[int, ...]:
    values = _one_a_rank(name, value, world_size)
    if any(item != int(item) for item in values):
        raise InvalidInputError(f"{name} must be bytes, and whole, got {value!r}")
    return tuple(int(item) for item in values)


def _compact(values: tuple[Any, ...]) -> Any:
    return values[0] if len(set(values)) == 1 else list(values)
