"""Assumptions about machines where nothing was given, each value with its source.

Bandwidths are bytes per millisecond per rank, latencies the milliseconds of a collective that carries next to
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

GIB = 1 << 30

CPU_DEVICE = "cpu"
"""The device that has no memory of its own: its tier is the host's."""


@frozen
class InputValue:
    """Value with its origin: ``given``, ``detected``, ``measured`` or ``assumed``, and the source of the last two."""

    value: Any
    origin: str
    source: str = ""

    def to_data(self) -> dict[str, Any]:
        """Return JSON data."""
        data = {"value": self.value, "provenance": self.origin}
        return {**data, "source": self.source} if self.source else data


def _all_from(source: str, values: Mapping[str, Any]) -> dict[str, InputValue]:
    return {name: InputValue(value, "assumed", source) for name, value in values.items()}


# torchrec/distributed/planner/constants.py.
_TORCHREC = _all_from(
    "TorchRec 1.8 default",
    {
        "hbm_cap": 32 * GIB,
        "ddr_cap": 128 * GIB,
        "hbm_mem_bw": 897 * GIB / 1000,
        "ddr_mem_bw": 51 * GIB / 1000,
        "hbm_to_ddr_mem_bw": 32 * GIB / 1000,
        "intra_host_bw": 600 * GIB / 1000,
        "inter_host_bw": 12.5 * GIB / 1000,
    },
)
_LATENCIES = _all_from(
    "the order of the latencies that nccl-tests reports for small all-to-alls over NVLink and InfiniBand",
    {"intra_host_latency_ms": 0.02, "inter_host_latency_ms": 0.05},
)
# One thread a rank, on two cores of an Intel Xeon, with torch 2.13: lookups of 64 to 128 float32 columns
# ran at 4.2 to 5.8 GiB/s; gloo's all-to-all of 1 to 64 MiB over the loopback brought each of 2 or 4 ranks 1.0 to 2.0
# GiB/s, and took 0.06 to 0.13 ms with next to nothing to carry.
_OF_A_XEON = _all_from(
    "as on an Intel Xeon with one thread a rank, not measured here: lookups, gloo all-to-alls",
    {"ddr_mem_bw": 5 * GIB / 1000, "intra_host_bw": 1.2 * GIB / 1000, "intra_host_latency_ms": 0.1},
)
_NETWORK = _all_from(
    "a network of 10 Gbit/s under TCP", {"inter_host_bw": 10e9 / 8 / 1000, "inter_host_latency_ms": 0.2}
)
_OF_A_DEVICE = frozenset(name for name in _TORCHREC if name.startswith("hbm"))


def assumptions_of(device: str, *, with_cpus: bool = False) -> Mapping[str, InputValue]:
    """Return the assumptions about a machine with ranks of ``device``, by the names of ``Topology``'s arguments.

    Args:
        device: type of the ranks' devices.
        with_cpus: other ranks have none; collectives, in which all take part, are then as slow as theirs.
    """
    common = {**_TORCHREC, **_LATENCIES}
    if with_cpus:
        links = {
            name: assumed for name, assumed in {**_OF_A_XEON, **_NETWORK}.items() if name != "ddr_mem_bw"
        }
        return {**common, **links, "cpu_ddr_mem_bw": _OF_A_XEON["ddr_mem_bw"]}
    if device != CPU_DEVICE:
        return common
    of_hosts = {**common, **_OF_A_XEON, **_NETWORK}
    return {name: assumed for name, assumed in of_hosts.items() if name not in _OF_A_DEVICE}
