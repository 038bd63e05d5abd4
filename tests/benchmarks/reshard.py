"""What checkpoints and reshards take: times beside ``torch.save`` and ``torch.load``, peaks beside ``max_extra_bytes``.

    python -m tests.benchmarks.reshard [--gib 1] [--ranks 2] [--tables 12] [--folder DIR]

The tables have widths, and so kernel groups, of their own, and Adam. They go from rows cut over all ranks to whole
tables on one rank each, and back. Torch saves a rank's blocks and states without this library, synced to the disk as
checkpoints are, and loads them. A rank's peak is what its resident memory reached above what it was before, looked at
every 5 ms, without what it shares with files; what was freed is given back to the system before. Of three rounds, in
turn, the shortest time and the highest peak. A load is one into a model that has been made.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.planning.tables.workload import table_to_data
from shardwright_testing.ranks import RankPool

GIB, MIB = 1 << 30, 1 << 20
TIMEOUT_S = 900.0
ROUNDS = 3
PICK: dict[str, Callable[[float, float], float]] = {"s": min, "peak_mib": max}
SMALLEST_DIM, DIM_STEP = 64, 8
LIMITS = (None, 1.0, 0.6, 0.3, 0.15)
"""``max_extra_bytes``, as a part of a rank's share of the model."""


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


def layout(cut: str, rows: int, dim: int, number: int) -> sw.Layout:
    """A table's blocks: rows over all ranks, or all on one."""
    ranks = dist.get_world_size()
    parts, first = (ranks, 0) if cut == "row_wise" else (1, number % ranks)
    return sw.Layout(
        [sw.BlockRun(sw.RowsRange(rows, parts=parts), sw.ColumnRange(0, dim), parts, rank=first)]
    )


def plan_of(cut: str, bags: Any) -> sw.ShardingPlan:
    """A plan that cuts all tables so, with the document that `diff` reads."""
    sharder = sw.EmbeddingBagCollectionSharder({"optimizer": "adam", "learning_rate": 0.1})
    specs = sharder.tables(bags, "")
    sharding = {
        spec.name: sw.ParameterSharding(
            cut, "fused_torch", layout(cut, spec.num_embeddings, spec.embedding_dim, number)
        )
        for number, spec in enumerate(specs)
    }
    topology = sw.Topology(dist.get_world_size(), "cpu")
    stated = {"tables": {"value": [table_to_data(spec) for spec in specs]}}
    document = {"topology": topology.to_data(), "inputs": stated}
    return sw.ShardingPlan({"": sw.EmbeddingModuleShardingPlan(sharding)}, document)


def tables(gib: float, count: int) -> Any:
    """Tables of as many bytes each, with Adam's states as many together as asked."""
    dims = [SMALLEST_DIM + DIM_STEP * number for number in range(count)]
    return sw.EmbeddingBagCollection(
        [
            sw.EmbeddingBagConfig(
                name=f"t{dim}",
                num_embeddings=int(gib * GIB / count / (3 * 4 * dim)),
                embedding_dim=dim,
                feature_names=[f"f{dim}"],
            )
            for dim in dims
        ],
        device="meta",
    )


def model_of(bags: Any, plan: sw.ShardingPlan) -> Any:
    """A sharded model, whose Adam has states."""
    sharder = sw.EmbeddingBagCollectionSharder({"optimizer": "adam", "learning_rate": 0.1})
    return sw.DistributedModelParallel(bags, plan=plan, sharders=[sharder])


def work(gib: float, count: int, folder: str) -> dict[str, Any]:
    """One rank's figures."""
    torch.set_num_threads(1)
    bags = tables(gib, count)
    plans = [plan_of(cut, bags) for cut in ("row_wise", "table_wise")]
    moves = sw.compare_plans(*plans).moves
    model, share = model_of(bags, plans[0]), int(gib * GIB / dist.get_world_size())
    found: dict[str, Any] = {
        "diff": {"sent_mib": moves.sent_bytes / dist.get_world_size() / MIB, "ms": moves.ms}
    }
    own = Path(folder) / f"plain{dist.get_rank()}.pt"
    calls: dict[str, Callable[[], Any]] = {
        "torch.save": lambda: save_plainly(model, own),
        "torch.load": lambda: torch.load(own, weights_only=True),
        "save_checkpoint": lambda: sw.save_checkpoint(folder, model, keep=1),
        "load_checkpoint": lambda: sw.load_checkpoint(folder, model),
        "load_checkpoint, not verified": lambda: sw.load_checkpoint(folder, model, verify=False),
    }
    for _ in range(ROUNDS):
        for name, call in calls.items():
            note(found, name, measured(call))
        for limit in LIMITS:
            name = "reshard" if limit is None else f"reshard, max_extra_bytes={limit * share / MIB:.0f} MiB"
            note(found, name, resharded(model, plans, None if limit is None else int(limit * share)))
    return found


def save_plainly(model: Any, path: Path) -> None:
    """Save this rank's blocks and their states by torch alone."""
    states = [model.state_dict(), *model.fused_optimizer.state_dict()["state"].values()]
    values = [value for state in states for value in state.values()]
    blocks = [[own for _, own in value.blocks] if hasattr(value, "blocks") else value for value in values]
    with path.open("wb") as file:
        torch.save(blocks, file)
        file.flush()
        os.fsync(file.fileno())


def resharded(model: Any, plans: Sequence[sw.ShardingPlan], limit: int | None) -> dict[str, float]:
    """Seconds and peak of a reshard, what it was reckoned to need, and what it sent; all but the peak 0 if refused."""
    said: list[Any] = []
    try:
        times = measured(lambda: said.append(model.reshard(plans[1], max_extra_bytes=limit)))
    except sw.ShardwrightError:
        return {"s": 0.0, "peak_mib": 0.0}
    model.reshard(plans[0])
    return {**times, "reckoned_mib": said[0].peak_bytes / MIB, "sent_mib": said[0].sent_bytes / MIB}


def measured(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds and peak of a call, after what was freed is given back: the C library keeps small pieces."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return timed(call)


def note(found: dict[str, Any], name: str, now: dict[str, float]) -> None:
    """Keep the shortest time and the highest peak."""
    before = found.get(name, now)
    found[name] = {key: PICK.get(key, max)(value, before[key]) for key, value in now.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of weights and states of all tables")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tables", type=int, default=12)
    parser.add_argument("--folder", help="on the disk to be measured; a temporary one by default")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    folder = tempfile.mkdtemp(dir=asked.folder)
    try:
        with RankPool(asked.ranks, backend="gloo") as pool:
            results = pool.run(work, asked.ranks, asked.gib, asked.tables, folder, timeout_s=TIMEOUT_S)
    finally:
        shutil.rmtree(folder)
    if asked.json:
        print(json.dumps(results, indent=1))
        return
    show(results, asked)


def show(results: Sequence[dict[str, Any]], asked: argparse.Namespace) -> None:
    """Print a table: of each call its slowest rank and highest peak."""
    print(f"{asked.tables} tables, {asked.gib} GiB with Adam's states, on {asked.ranks} ranks")
    print(f"{'':40}{'s':>8}{'peak MiB':>10}{'reckoned':>10}{'sent MiB':>10}")
    for name in [name for name in results[0] if name != "diff"]:
        of_ranks = [result[name] for result in results]
        worst = {
            key: max(rank.get(key, 0.0) for rank in of_ranks) for key in ("s", "peak_mib", "reckoned_mib")
        }
        if worst["s"] == 0:
            print(f"{name:40}{'refused':>8}")
            continue
        sent = max(rank.get("sent_mib", 0.0) for rank in of_ranks)
        print(f"{name:40}{worst['s']:8.2f}{worst['peak_mib']:10.0f}{worst['reckoned_mib']:10.0f}{sent:10.0f}")
    forecast = results[0]["diff"]
    print(f"diff says: {forecast['sent_mib']:.0f} MiB leave a rank, {forecast['ms'] / 1000:.2f} s")


if __name__ == "__main__":
    main()
