"""Experiments with collectives: latency and bandwidth of an all-to-all between ranks of one host."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist

from shardwright.runtime.ranks.environment import ShardingEnv

_SIZES = (8, 1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23)
_ROUNDS = 12


def measure_links() -> dict[str, float]:
    """Bandwidth, bytes/ms a rank, and latency, ms, of exchanges as the engine makes them; every rank calls this.

    A line through times and bytes, each point weighed by its time: the latency is what nothing takes.
    """
    env = ShardingEnv.from_process_group()
    took = [_exchange_ms(env, size) for size in _SIZES]
    others = (env.world_size - 1) / env.world_size
    sent = np.array(_SIZES, dtype=float) * env.world_size * others
    times = torch.tensor(took, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    slope, latency = np.polyfit(sent, times.numpy(), 1, w=1 / times.numpy())
    return {
        "intra_host_bw": 1 / max(float(slope), 1e-12),
        "intra_host_latency_ms": max(float(latency), 0.0),
    }


def _exchange_ms(env: ShardingEnv, size: int) -> float:
    """Median time of an exchange of so many bytes with each rank, ms."""
    own = torch.zeros(env.world_size * size // 4)
    received = torch.empty_like(own)
    splits = [size // 4] * env.world_size
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        env.communicator.all_to_all(received, own, splits, splits, label="calibrate").wait()
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times[2:]))
