"""Experiments with links: all-to-alls inside hosts and between them, and copies between a host and its devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright_plugins.bandwidths.measured import device_bandwidths, exchange_ms

_CPU = torch.device("cpu")
_SIZES = (8, 1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23)


def measure_links() -> dict[str, float]:
    """Bandwidth, bytes/ms a rank, and latency, ms, of exchanges as the engine makes them; every rank calls this.

    1. Every rank: all-to-alls among the ranks of each host, all hosts at the same time, if a host has several.
    2. Every rank: all-to-alls with the ranks of other hosts only, if there are some.
    """
    env = ShardingEnv.from_process_group()
    ranks, local = np.arange(env.world_size), env.local_world_size
    is_near = ranks // local == env.rank // local
    found: dict[str, float] = {}
    for link, partners in (("intra_host", is_near), ("inter_host", ~is_near)):
        others = int((partners & (ranks != env.rank)).sum())
        if others:
            found |= _line(link, env, partners.tolist(), others)
    return found


def measure_copies() -> dict[str, Any] | None:
    """Measure the memory of this rank's accelerator and copies to it from the host's; every rank calls this.

    Returns:
        Type of the accelerator, ``device``, and bandwidths by the names of ``Topology``'s arguments, bytes/ms, while
        the other ranks copy as well; ``None`` where torch sees no accelerator.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    dist.barrier()
    if accelerator is None:
        return None
    number = int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count()
    return {
        "device": accelerator.type,
        **device_bandwidths(torch.device(accelerator.type, number)),
    }


def _line(link: str, env: ShardingEnv, partners: Sequence[bool], others: int) -> dict[str, float]:
    """Fit a line through times and bytes, each point weighed by its time: the latency is what nothing takes."""
    took = [exchange_ms(env, _CPU, [size // 4 * is_partner for is_partner in partners]) for size in _SIZES]
    times = torch.tensor(took, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    sent = np.array(_SIZES, dtype=float) * others
    slope, latency = np.polyfit(sent, times.numpy(), 1, w=1 / times.numpy())
    return {
        f"{link}_bw": 1 / max(float(slope), 1e-12),
        f"{link}_latency_ms": max(float(latency), 0.0),
    }
