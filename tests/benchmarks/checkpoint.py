"""What a checkpoint in shards takes: peaks and throughput, beside ``torch.save`` of the same bytes in the same run.

    python -m tests.benchmarks.checkpoint [--gib 4] [--ranks 2] [--folder DIR]

One table of the given size is cut by rows over the ranks, with a row-wise optimizer. Each rank saves its shards and
reads them again; before, it saves the same bytes by ``torch.save``, synced to the disk as the former are. The page
cache is what it is. A rank's peak is what its resident memory reached above what it was before, looked at every 5 ms,
without what it shares with files. Of three rounds, in turn, the shortest time and the highest peak.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright_testing.ranks import RankPool

GIB, MIB = 1 << 30, 1 << 20
DIM = 128
TIMEOUT_S = 900.0
ROUNDS = 3
PICK: dict[str, Callable[[float, float], float]] = {"s": min, "peak_mib": max}


def resident() -> int:
    """Bytes of this process in memory, without what files share with it."""
    with open("/proc/self/statm") as statm:
        pages = [int(word) for word in statm.read().split()]
    return (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most memory above what there was, while this lasts."""
    before, most, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()


def timed(what: Callable[[], Any]) -> dict[str, float]:
    """Seconds and peak of a call that all ranks make at once."""
    dist.barrier()
    with peak() as most:
        start = time.perf_counter()
        what()
        seconds = time.perf_counter() - start
    return {"s": seconds, "peak_mib": most[0] / MIB}


def work(gib: float, folder: str) -> dict[str, Any]:
    """One rank's figures."""
    torch.set_num_threads(1)
    rows = int(gib * GIB / (4 * DIM))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bags = sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"])],
        device="meta",
    )
    layout = sw.Layout([sw.BlockRun(sw.RowsRange(rows, parts=ranks), sw.ColumnRange(0, DIM), ranks, rank=0)])
    sharding = sw.EmbeddingModuleShardingPlan({"t": sw.ParameterSharding("row_wise", "fused_torch", layout)})
    sharder = sw.EmbeddingBagCollectionSharder({"optimizer": "row_wise_adagrad", "learning_rate": 0.1})
    model = sw.DistributedModelParallel(bags, plan=sw.ShardingPlan({"": sharding}), sharders=[sharder])
    block = next(iter(model.parameters())).detach()
    own = Path(folder) / f"plain{rank}.pt"

    def plain() -> None:
        with own.open("wb") as file:
            torch.save(block, file)
            file.flush()
            os.fsync(file.fileno())

    # Once a process: imports, and the disk's first blocks.
    sw.load_checkpoint(
        sw.save_checkpoint(f"{folder}/{rank}", torch.nn.Linear(1, 1)).path, torch.nn.Linear(1, 1)
    )
    plain()
    calls: dict[str, Callable[[], Any]] = {
        "torch.save": plain,
        "save_checkpoint": lambda: sw.save_checkpoint(folder, model, keep=1),
        "torch.load": lambda: torch.load(own, weights_only=True),
        "load_checkpoint": lambda: sw.load_checkpoint(folder, model),
        "load_checkpoint, not verified": lambda: sw.load_checkpoint(folder, model, verify=False),
    }
    if gib <= 1:
        calls["state_dict()"] = model.state_dict
    found: dict[str, Any] = {"block_mib": block.nbytes / MIB}
    for _ in range(ROUNDS):  # in turn, since others use the disk too
        for name, call in calls.items():
            now, before = timed(call), found.get(name)
            found[name] = now if before is None else {key: PICK[key](now[key], before[key]) for key in now}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.25, help="of the table")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="on the disk to be measured; a temporary one by default")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    folder = tempfile.mkdtemp(dir=asked.folder)
    try:
        with RankPool(asked.ranks, backend="gloo") as pool:
            results = pool.run(work, asked.ranks, asked.gib, folder, timeout_s=TIMEOUT_S)
    finally:
        shutil.rmtree(folder)
    if asked.json:
        print(json.dumps(results, indent=1))
        return
    print(
        f"a table of {asked.gib} GiB on {asked.ranks} ranks, {results[0]['block_mib']:.0f} MiB each; slowest rank"
    )
    print(f"{'':32}{'s':>8}{'MiB/s a rank':>14}{'peak MiB':>10}{'beside torch':>14}")
    for name in [name for name in results[0] if name != "block_mib"]:
        slowest = max(result[name]["s"] for result in results)
        most = max(result[name]["peak_mib"] for result in results)
        beside = max(result["torch.load" if "load" in name else "torch.save"]["s"] for result in results)
        speed = results[0]["block_mib"] / slowest
        print(f"{name:32}{slowest:8.2f}{speed:14.0f}{most:10.0f}{beside / slowest:14.2f}")


if __name__ == "__main__":
    main()
