"""Arguments of a topology that are detected on the machines that a model is to be trained on."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.planning.machines.host_memory import host_memory_bytes
from shardwright.runtime.ranks.detection.bandwidths import (
    host_link_bandwidth,
    link_bandwidths,
    memory_bandwidth,
)
from shardwright.runtime.ranks.devices import has_accelerator, memory_bytes, with_index
from shardwright.runtime.ranks.environment import ShardingEnv


def memory_arguments(env: ShardingEnv) -> dict[str, int]:
    """Detect a rank's share of this machine's memory, by the names of ``Topology``'s arguments.

    Args:
        env: the ranks.
    """
    found = {"hbm_cap": memory_bytes(env.device_type)}
    if (host := host_memory_bytes()) is not None:
        found["ddr_cap"] = host // env.local_world_size
    return {name: value for name, value in found.items() if value is not None}


def measure_together(env: ShardingEnv, *, is_wanted: bool) -> dict[str, Any]:
    """Measure what ranks on accelerators have, by the names of ``Topology``'s arguments; every rank makes this call.

    1. Rank 0 broadcasts whether it wants to know.
    2. Every rank measures its device's memory and its link to the host; then all measure the links between them.
    3. What they found is gathered: the least of each counts.

    Between ranks on CPUs nothing is measured: a busy machine's bandwidths would give another plan in each run.

    Args:
        env: the ranks.
        is_wanted: rank 0 wants to know; the same on every rank, or not.

    Returns:
        The least of each; empty where nothing is measured. What is not in it cannot be detected here.
    """
    if not has_accelerator(env.device_type):
        return {}
    with env.together("measuring the machine"):
        if not env.communicator.broadcast_object(is_wanted):
            return {}
        device = with_index(torch.device(env.device_type))
        found = memory_arguments(env) | device_bandwidths(device)
        found |= {f"{link}_bw": value for link, value in link_bandwidths(env, device).items()}
        told = env.communicator.all_gather_objects(found)
        return {name: min(one[name] for one in told if name in one) for name in found}


def device_bandwidths(device: torch.device) -> dict[str, float]:
    """Detect the bandwidths of an accelerator's memory and of its link to the host, by ``Topology``'s arguments.

    Args:
        device: the accelerator, with its number.
    """
    return {"hbm_mem_bw": memory_bandwidth(device), "hbm_to_ddr_mem_bw": host_link_bandwidth(device)}
