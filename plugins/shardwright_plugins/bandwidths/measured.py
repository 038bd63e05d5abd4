"""Bandwidths of a device's memory and links, by the device's attributes or by copies that are timed.

All are bytes per millisecond, as in topologies. What is timed is rounded, so that the next run gives the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.runtime.ranks.devices import is_host, with_index
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright_plugins.measuring.timing import quartiles_ms

_COPIED_BYTES = 1 << 28
"""Bytes of a timed copy: five times the largest cache of a device, a millisecond of PCIe's fourth generation x 64."""

_SENT_BYTES = 1 << 24
"""Bytes that each rank sends in a timed exchange; latency is then a small part of it."""

_ROUNDS = 10
_DIGITS = 2
"""Digits that are kept of what was timed: the noise of a machine that does nothing else is a few percent."""


def bandwidths(env: ShardingEnv) -> dict[str, float]:
    """Measure what a rank's accelerator has, by the names of ``Topology``'s arguments; every rank makes this call.

    1. Every rank measures its device's memory and its link to the host.
    2. All ranks measure the links between them.

    Args:
        env: the ranks.
    """
    device = with_index(torch.device(env.device_type))
    links = {f"{link}_bw": value for link, value in link_bandwidths(env, device).items()}
    return {**device_bandwidths(device), **links}


def device_bandwidths(device: torch.device) -> dict[str, float]:
    """Measure an accelerator's memory and its link to the host, by the names of ``Topology``'s arguments.

    Args:
        device: the accelerator, with its number.
    """
    return {"hbm_mem_bw": memory_bandwidth(device), "hbm_to_ddr_mem_bw": host_link_bandwidth(device)}


def rounded(value: float) -> float:
    """The value to as many digits as measurements of it agree in."""
    return float(f"{value:.{_DIGITS}g}")


def memory_bandwidth(device: torch.device, *, num_bytes: int = _COPIED_BYTES) -> float:
    """Bandwidth of a device's own memory, bytes/ms: by its attributes where it has them, else a timed copy's."""
    told = _by_attributes(device)
    if told is not None:
        return told
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return rounded(2 * num_bytes / _time_ms(lambda: target.copy_(source), device))  # read and written


def _by_attributes(device: torch.device) -> float | None:
    """Clock x width x 2 transfers a clock, as CUDA tells the memory of a device."""
    if is_host(device):
        return None
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    width_bits = getattr(properties, "memory_bus_width", 0)
    return 2.0 * clock_khz * (width_bits // 8) or None


def host_link_bandwidth(device: torch.device, *, num_bytes: int = _COPIED_BYTES) -> float:
    """Bandwidth of a copy from page-locked host memory to a device, bytes/ms."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    source = source if is_host(device) else source.pin_memory()
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return rounded(num_bytes / _time_ms(lambda: target.copy_(source, non_blocking=True), device))


def link_bandwidths(
    env: ShardingEnv, device: torch.device, *, num_bytes: int = _SENT_BYTES
) -> dict[str, float]:
    """Bandwidths between ranks, bytes/ms that each of them receives in an all-to-all; every rank makes this call.

    1. Every rank: all-to-alls within each host, if it has several ranks.
    2. Every rank: all-to-alls between hosts only, if there are several.
    3. Every rank: the times are gathered, and the longest counts.

    Args:
        env: the ranks.
        device: this rank's device.
        num_bytes: bytes that each rank sends.

    Returns:
        Bandwidth of each link that there is, ``"intra_host"`` and ``"inter_host"``; the same on every rank.
    """
    found = {}
    local, rank = env.local_world_size, env.rank
    same_host = [other // local == rank // local for other in range(env.world_size)]
    peers = {
        "intra_host": [is_same and other != rank for other, is_same in enumerate(same_host)],
        "inter_host": [not is_same for is_same in same_host],
    }
    for link, partners in peers.items():
        if any(partners):
            sent = num_bytes // 4 // sum(partners)
            splits = [sent * is_partner for is_partner in partners]
            own_ms = exchange_ms(env, device, splits)
            slowest_ms = max(env.communicator.all_gather_objects(own_ms))
            found[link] = rounded(4 * sum(splits) / slowest_ms)
    return found


def exchange_ms(env: ShardingEnv, device: torch.device, splits: list[int]) -> float:
    """Time of an all-to-all as the engine makes it, ms; every rank makes this call.

    Args:
        env: the ranks.
        device: this rank's device.
        splits: numbers of 32 bits to and from each rank.
    """
    sent = torch.zeros(sum(splits), device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        env.communicator.all_to_all(received, sent, splits, splits, label="a measured exchange").wait()

    return _time_ms(exchange, device)


def _time_ms(work: Callable[[], Any], device: torch.device) -> float:
    return quartiles_ms(work, rounds=_ROUNDS, device=device)[0]
