"""Topologies of machines that were measured beforehand, by the documents of ``shardwright calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardwright.arguments import brief
from shardwright.errors import InvalidInputError
from shardwright.planning.documents import MACHINE
from shardwright.planning.machines.given import LATENCY, one_a_rank
from shardwright.planning.machines.topology import CPU_DEVICE, InputValue, Topology
from shardwright.planning.text import count_text


def machine_topology(path: str | Path, world_size: int, compute_device: Any, **given: Any) -> Topology:
    """The topology of ranks on a machine, as :meth:`shardwright.Topology.from_machine` gives it.

    Args:
        path: machine document.
        world_size: number of ranks of the topology.
        compute_device: type of their devices, or one a rank.
        given: further arguments of :class:`shardwright.Topology`, which count instead of what was measured.

    Raises:
        InvalidInputError: the document is malformed, an argument is wrong, or the devices are others.
    """
    data = MACHINE.read(Path(path))
    try:
        MACHINE.check(data)
        one_a_rank("topology.speed", data["topology"].get("speed", 1.0), data["made"]["ranks"])
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
    others = "" if is_as_many else f", not {world_size}"
    source = (
        f"measured on {made['processor']}, {made['date']}, with {count_text(made['ranks'], 'rank')}{others}"
    )
    origin = "measured" if is_as_many else "assumed"
    origins = {name: InputValue(value, origin, source) for name, value in measured.items()}
    arguments: dict[str, Any] = {
        name: value for name, value in measured.items() if not name.endswith(LATENCY)
    }
    latencies = {
        name.removesuffix(LATENCY): value for name, value in measured.items() if name.endswith(LATENCY)
    }
    arguments |= {name: value for name, value in given.items() if value is not None}
    arguments["link_latencies_ms"] = latencies | arguments.get("link_latencies_ms", {})
    topology = Topology(world_size, compute_device, **arguments)
    stated = topology.provenance
    # What was given instead, or came out otherwise, keeps its own origin.
    noted = {name: one for name, one in origins.items() if stated[name].value == one.value}
    return topology.evolved(provenance={**stated, **noted})
