"""Ranks that save without an end, and kill -9 for them at a random moment; what is left must load.

Legend: the ways to save, and where the moment is drawn.

- ``sync``, ``async``: any time after the first checkpoint;
- ``staging``: while the state is copied for an asynchronous save;
- ``removing``: while an older checkpoint is removed.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright_plugins.checkpoint.folder import steps_in

WAYS = ("sync", "async", "staging", "removing")
RANKS, START_S = 2, 180.0
ROWS, DIM = 200_000, 16
_ANY_TIME_S = 0.4  # longest wait before a kill, of drawn waits (taste)
_UNLINK_S = 0.03  # a file that goes takes so long, so that a folder that goes can be struck
_REMOVAL_S = 4 * _UNLINK_S


@attrs.frozen
class Strike:
    """What a kill left.

    Args:
        how: way to save.
        struck: what was under way by the names in the folder: ``"saving"``, ``"removing"``, both or ``"neither"``.
        step: newest complete checkpoint.
    """

    how: str
    struck: str
    step: int


def config() -> sw.EmbeddingBagConfig:
    return sw.EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"])


def model() -> sw.DistributedModelParallel:
    parts = sw.RowsRange(ROWS, parts=dist.get_world_size())
    layout = sw.Layout([sw.BlockRun(parts, sw.ColumnRange(0, DIM), dist.get_world_size(), rank=0)])
    sharding = sw.EmbeddingModuleShardingPlan({"t": sw.ParameterSharding("row_wise", "fused_torch", layout)})
    return sw.DistributedModelParallel(
        sw.EmbeddingBagCollection([config()], device="meta"), plan=sw.ShardingPlan({"": sharding})
    )


def be_victim(rank: int, store: str, folder: str, how: str, told: Connection) -> None:
    """Save steps without an end; say before each what the last copy of the state took, in seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    if how == "removing":
        os.unlink = _slowly(os.unlink)
    made, took_s = model(), 0.0
    for step in range(1, 1_000_000):
        for parameter in made.parameters():
            parameter.detach().fill_(step)
        told.send(took_s)
        start = time.monotonic()
        saved = sw.save_checkpoint(folder, made, step=step, keep=2, asynchronous=how in ("async", "staging"))
        took_s = time.monotonic() - start
        if how == "staging":
            saved.wait(START_S)


def _slowly(unlink: Any) -> Any:
    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(_UNLINK_S)
        unlink(*arguments, **options)

    return slow


def strike(how: str, folder: Path, drawn: random.Random) -> Strike:
    """Have ranks save, kill all at once, and load what is there.

    Args:
        how: way to save.
        folder: a new folder.
        drawn: source of the moment.
    """
    folder.mkdir()
    # Forked from a process that has imported all, as the pool's ranks are.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", __name__])
    told, ours = context.Pipe(duplex=False)
    others = context.Pipe(duplex=False)
    saved, store = folder / "checkpoints", str(folder / "store")
    victims = [
        context.Process(target=be_victim, args=(rank, store, str(saved), how, ends), daemon=True)
        for rank, ends in enumerate((ours, others[1]))
    ]
    for victim in victims:
        victim.start()
    try:
        _await_moment(how, saved, told, drawn)
    finally:
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.join(START_S)
    left = [name for name in ("saving", "removing") if any(saved.glob(f".{name}-*"))]
    step = _newest_loads(saved)
    _next_job_clears_away(saved, step)
    return Strike(how, " and ".join(left) or "neither", step)


def _await_moment(how: str, saved: Path, told: Connection, drawn: random.Random) -> None:
    deadline = time.monotonic() + START_S
    while not steps_in(saved):
        assert time.monotonic() < deadline, "no checkpoint was saved"
        time.sleep(0.001)
    if how == "removing":
        time.sleep(drawn.uniform(0.0, _ANY_TIME_S))  # not always the first that goes
        while not any(saved.glob(".removing-*")):
            assert time.monotonic() < deadline, "none was removed"
        time.sleep(drawn.uniform(0.0, _REMOVAL_S))
        return
    if how == "staging":
        while told.poll():
            told.recv()
        assert told.poll(START_S)
        took_s = told.recv()
        assert told.poll(START_S)
        took_s = told.recv()  # a copy begins now
        time.sleep(drawn.uniform(0.0, took_s))
        return
    time.sleep(drawn.uniform(0.0, _ANY_TIME_S))


def _newest_loads(saved: Path) -> int:
    """Load into this process: every weight is the number of the step."""
    module = sw.EmbeddingBagCollection([config()], device="cpu")
    loaded = sw.load_checkpoint(saved, module, strict=False)
    assert loaded.step == max(steps_in(saved))
    weights = module.state_dict()["embedding_bags.t.weight"].unique()
    assert torch.equal(weights, torch.tensor([float(loaded.step)])), weights
    return loaded.step


def _next_job_clears_away(saved: Path, step: int) -> None:
    sw.save_checkpoint(saved, torch.nn.Linear(1, 1), step=step + 1)
    assert not [path for path in saved.iterdir() if path.name.startswith((".saving", ".removing"))]
