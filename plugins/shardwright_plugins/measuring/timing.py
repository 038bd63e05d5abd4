"""The timer of experiments: of kernels, of exchanges between ranks, and of a fixed work that tells a machine's speed.

Legend: P parts of a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwright.runtime.ranks.devices import is_host
from shardwright_plugins.measuring.phases import keep_memory

_CPU = torch.device("cpu")
_WARM = 2
_ROWS, _COLUMNS, _IDS, _CALLS = 1 << 18, 64, 1 << 15, 2000
REFERENCE_ROUNDS = 120


def quartiles_ms(
    *parts: Callable[[], Any],
    rounds: int,
    device: torch.device = _CPU,
    before: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Lower quartiles of the times of the parts of a round, ms: ``[P]``. What else runs only adds to a time.

    Args:
        parts: functions, which are called one after the other in each round, each to its end on the device.
        rounds: rounds that count; two go before them.
        device: the device that the parts work on.
        before: function that is called before each round, and not timed.
    """
    clocks = np.zeros((_WARM + rounds, len(parts) + 1))
    for row in clocks:
        before()
        row[0] = time.perf_counter()
        for number, part in enumerate(parts, start=1):
            part()
            if not is_host(device):
                torch.accelerator.synchronize(device)
            row[number] = time.perf_counter()
    quartiles = 1e3 * np.quantile(np.diff(clocks, axis=1)[_WARM:], 0.25, axis=0)
    return [float(own) for own in quartiles]


def reference_ms(rounds: int = REFERENCE_ROUNDS) -> float:
    """Time of a fixed work on all ranks at the same time, ms, of the slowest; every rank makes this call.

    The work is of the kinds that a step is made of, and nothing of this package: rows read from 64 MiB and summed, ids
    sorted, and small calls of Python. So the time tells how quick the machine is now, whatever version measures it.
    Memory is kept as in the experiments: pages that are taken anew make a first measurement a tenth slower.

    Args:
        rounds: rounds that count.
    """
    keep_memory()
    generator = torch.Generator().manual_seed(dist.get_rank())
    weight = torch.ones(_ROWS, _COLUMNS)
    ids = torch.randint(_ROWS, (_IDS,), generator=generator)

    def work() -> None:
        weight[ids].view(-1, 8, _COLUMNS).sum(1)
        ids.sort()
        for number in range(_CALLS):
            divmod(number, 7)

    told = torch.tensor(quartiles_ms(work, rounds=rounds, before=dist.barrier), dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)
