"""One rank of two hosts, a process of its own: ``python -m tests.distributed.hosts.host_rank RANK STORE RESULT``.

It trains on the network that the process is started in, and writes what it saw, with the bytes that left the host.
"""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from tests.distributed import workers
from tests.equality import Case, Table

INTERFACE = "wire"
TYPES = ("table_row_wise", "grid_shard", "table_column_wise", "row_wise", "table_wise", "data_parallel")
CASE = Case(
    [
        Table(7 + 3 * index, 8, ("a", f"f{index}"), pooling, sharding_type, "fused_torch", offset=2 * index)
        for index, sharding_type in enumerate(TYPES)
        for pooling in ("SUM", "MEAN")
    ],
    (3, 0, 2, 4),
    is_weighted=True,
    local_world_size=2,
)


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def main(rank: int, store: str, result: str) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME=INTERFACE, RANK=str(rank), WORLD_SIZE=str(CASE.world_size))
    shared = dist.FileStore(store, CASE.world_size)
    timeout = timedelta(seconds=40)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=CASE.world_size, timeout=timeout)
    before = sent_bytes()
    training = workers.train_case_on_hosts(CASE)
    dist.barrier()
    Path(result).write_bytes(pickle.dumps((training, sent_bytes() - before)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
