"""Values that a topology is made of: those that were given are checked, the others are assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from attrs import asdict

from shardwright.arguments import Within, check
from shardwright.errors import InvalidInputError, UnknownNameError, nearest
from shardwright.host.process import process_host
from shardwright.planning.assumptions import CPU_DEVICE, InputValue, assumptions_of
from shardwright.planning.documents.limits import MOST_MEMORY_BYTES, MOST_SPEED
from shardwright.planning.machines.replicas import Replicas

CPU_TIER = "cpu_ddr"
"""Memory of the ranks on a CPU, in a topology with others on devices."""
LATENCY = "_latency_ms"
"""End of the name of a link's latency among the inputs."""
_KNOWN_DEVICES = (CPU_DEVICE, "cuda")
_LINKS = ("intra_host", "inter_host")

MemoryBytes = Annotated[float, Within(ge=0, le=MOST_MEMORY_BYTES)]
Speed = Annotated[float, Within(ge=1 / MOST_SPEED, le=MOST_SPEED)]


def tiers_of(device: str) -> tuple[str, ...]:
    """The tiers of a type of device, its own first."""
    return ("ddr",) if device == CPU_DEVICE else ("hbm", "ddr")


def main_device(devices: Sequence[str]) -> str:
    """The type of ranks' devices; the CPU's only where there is no other."""
    return next((device for device in devices if device != CPU_DEVICE), CPU_DEVICE)


def attributes(asked: Mapping[str, Any], detected: Sequence[str]) -> dict[str, Any]:
    """The attributes of a topology but its replicas, the origin of each value among them.

    Args:
        asked: arguments of a topology by name, in the order of a plan document's inputs; ``None`` where not given.
        detected: the names of values that were read from the machine.

    Raises:
        InvalidInputError: a value is wrong, or contradicts another.
        UnknownNameError: no such device is known.
    """
    world_size, local = asked["world_size"], asked["local_world_size"] or asked["world_size"]
    devices = _devices_of_ranks(asked["compute_device"], world_size, local)
    own, is_mixed = main_device(devices), len(set(devices)) > 1
    latencies = asked["link_latencies_ms"]
    links = dict.fromkeys([*_LINKS, *latencies])
    named: dict[str, Any] = {}
    for name, value in asked.items():
        if name == "link_latencies_ms":
            named |= {link + LATENCY: latencies.get(link) for link in links}
        elif isinstance(value, Mapping):
            named |= {f"{name}.{key}": _plain(one) for key, one in value.items()}
        elif is_mixed or not name.startswith(CPU_TIER):
            named[name] = _plain(value)
    provenance = _with_assumed(named, own, assumptions_of(own, with_cpus=is_mixed), detected)
    values = {name: one.value for name, one in provenance.items()}
    tiers, between = tiers_of(own), dict.fromkeys(_LINKS, "_bw")
    memory = {tier: bytes_of_ranks(f"{tier}_cap", values[f"{tier}_cap"], world_size) for tier in tiers}
    if is_mixed:
        memory, tiers = _parted(memory, devices, asked, values["hbm_cap"]), (*tiers, CPU_TIER)
    for tier in asked["memory_bytes"]:
        memory[tier] = bytes_of_ranks(f"memory_bytes[{tier!r}]", values[f"memory_bytes.{tier}"], world_size)
    speeds = one_a_rank("speed", values.get("speed", 1.0), world_size)
    check("speed", speeds, tuple[Speed, ...])
    if own != CPU_DEVICE:
        between["hbm_to_ddr"] = "_mem_bw"
    return {
        "world_size": world_size,
        "compute_devices": devices,
        "local_world_size": local,
        "memory_bytes": memory,
        "memory_bandwidths": {tier: values[f"{tier}_mem_bw"] for tier in tiers}
        | dict(asked["memory_bandwidths"]),
        "link_bandwidths": {link: values[link + end] for link, end in between.items()}
        | dict(asked["link_bandwidths"]),
        "link_latencies_ms": {link: values[link + LATENCY] for link in links},
        "speeds": tuple(map(float, speeds)),
        "provenance": provenance,
    }


def _with_assumed(
    named: Mapping[str, Any], device: str, assumed: Mapping[str, InputValue], detected: Sequence[str]
) -> dict[str, InputValue]:
    """Values with their origins, those assumed that were not given; without those that nothing is assumed of.

    Args:
        named: values by name; ``None`` for those that were not given.
        device: the type of ranks' devices.
        assumed: assumptions by name.
        detected: the names of values that were read from the machine.

    Raises:
        InvalidInputError: something is said of device memory where the device has none.
    """
    given = {name: value for name, value in named.items() if value is not None}
    wrong = [f"{name}={value}" for name, value in given.items() if name.startswith("hbm_")]
    if device == CPU_DEVICE and wrong:
        raise InvalidInputError(
            f"{' and '.join(wrong)} given, but {device!r} has host memory only; give ddr_cap and ddr_mem_bw"
        )
    hosts = InputValue(named["world_size"], "assumed", "all ranks on one host")
    found = {"local_world_size": hosts, **assumed}
    for name, value in given.items():
        found[name] = InputValue(value, "detected" if name in detected else "given")
    return {name: found[name] for name in named if name in found}


def _plain(value: Any) -> Any:
    """A value as JSON data: arrays and tuples as lists."""
    if isinstance(value, Replicas):
        return asdict(value)
    plain = value.tolist() if isinstance(value, np.ndarray) else value
    return list(plain) if isinstance(plain, Sequence) and not isinstance(plain, str) else plain


def _devices_of_ranks(given: str | Sequence[str], world_size: int, local_world_size: int) -> tuple[str, ...]:
    """The type of each rank's device: one for all, or one a rank.

    Raises:
        InvalidInputError: ranks do not divide into hosts; or ranks of one device are no neighbours, on one host or on
            hosts of their own; or of two types neither is the CPU.
        UnknownNameError: a device is neither a CPU nor CUDA, and no loaded comm backend declares it.
    """
    devices = one_a_rank("compute_device", given, world_size)
    for device in dict.fromkeys(devices):
        _check_device(device)
    if world_size % local_world_size:
        raise InvalidInputError(
            f"{world_size} ranks do not divide into hosts of {local_world_size} (local_world_size); "
            f"{world_size % local_world_size} would be left over"
        )
    starts = [index for index in range(1, world_size) if devices[index] != devices[index - 1]]
    shown = ", ".join(f"{devices[index]!r} from rank {index}" for index in [0, *starts])
    if len(starts) > 1 or (starts and CPU_DEVICE not in devices):
        raise InvalidInputError(
            f"devices of ranks can be mixed if all of one type are neighbours and of two types one is {CPU_DEVICE!r}; "
            f"these are {shown}. Order the ranks by device."
        )
    if local_world_size < world_size and any(start % local_world_size for start in starts):
        raise InvalidInputError(
            f"on several hosts, each has one type of device; these are {shown}, with {local_world_size} ranks a host"
        )
    return devices


def _check_device(device: str) -> None:
    if device in _KNOWN_DEVICES:
        return
    backends = process_host().comm_backends
    known = sorted({*_KNOWN_DEVICES, *(one for name in backends.names for one in backends[name].devices)})
    if device not in known:
        said = str(device).lower()
        near = nearest("cuda" if said == "gpu" else said, known)
        raise UnknownNameError(f"no compute_device {device!r}. Known: {', '.join(known)}.{near}")


def _parted(
    capacities: Mapping[str, tuple[int, ...]], devices: Sequence[str], asked: Mapping[str, Any], hbm: Any
) -> dict[str, tuple[int, ...]]:
    """Memory of ranks with a device, bytes of each rank by tier, and that of ranks on a CPU, whose tier is another.

    Args:
        capacities: memory of all ranks, as if each had both.
        devices: type of each rank's device.
        asked: arguments of the topology.
        hbm: the device memory, one number or one a rank.

    Raises:
        InvalidInputError: memory is given to ranks that do not have it.
    """
    if CPU_TIER in asked["memory_bytes"]:
        raise InvalidInputError(
            f"the memory of ranks on a CPU, {CPU_TIER!r}, is given by ddr_cap, one number a rank"
        )
    is_cpu = [device == CPU_DEVICE for device in devices]
    for rank, value in enumerate(hbm if isinstance(hbm, list) else ()):
        if value and is_cpu[rank]:
            raise InvalidInputError(
                f"hbm_cap is {value!r} for rank {rank}, which has no device; give 0 there"
            )
    kept = {
        tier: tuple(0 if cpu else value for value, cpu in zip(values, is_cpu, strict=True))
        for tier, values in capacities.items()
    }
    own = tuple(value if cpu else 0 for value, cpu in zip(capacities["ddr"], is_cpu, strict=True))
    return {**kept, CPU_TIER: own}


def one_a_rank(name: str, value: Any, world_size: int) -> tuple[Any, ...]:
    """A value for each rank: one for all, or one each.

    Raises:
        InvalidInputError: there are neither as many as ranks, nor one for all.
    """
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    values = tuple(value) if is_list else (value,) * world_size
    if len(values) != world_size:
        raise InvalidInputError(
            f"{name} has {len(values)} values for {world_size} ranks: give one for all, or one a rank"
        )
    return values


def bytes_of_ranks(name: str, value: Any, world_size: int) -> tuple[int, ...]:
    """Bytes of each rank; see :func:`one_a_rank`.

    Raises:
        InvalidInputError: they are not whole, or out of range.
    """
    values = one_a_rank(name, value, world_size)
    check(name, values, tuple[MemoryBytes, ...])
    if any(item != int(item) for item in values):
        raise InvalidInputError(f"{name} must be bytes, and whole, got {value!r}")
    return tuple(map(int, values))


def compact(values: tuple[Any, ...]) -> Any:
    """One value where all ranks have the same, else a list."""
    return values[0] if len(set(values)) == 1 else list(values)
