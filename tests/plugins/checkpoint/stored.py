"""Saving and loading by torch.distributed.checkpoint, with simulated ranks: the calls that DCP makes, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner


def save_of_ranks(states: list[dict[str, Any]], folder: Path) -> None:
    """What ``dcp.save`` does, for the state dicts of all ranks at once."""
    writers = [dcp.FileSystemWriter(folder, sync_files=False) for _ in states]
    planners = [DefaultSavePlanner() for _ in states]
    plans = []
    for rank, (state, writer, planner) in enumerate(zip(states, writers, planners, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for plan, writer, planner in zip(plans, writers, planners, strict=True):
        written = writer.write_data(planner.finish_plan(plan), planner)
        written.wait()
        results.append(written.value())
    writers[0].finish(metadata, results)


def load_one(state: dict[str, Any], folder: Path) -> None:
    """``dcp.load`` of one rank: planning to load asks no other rank."""
    dcp.load(state, checkpoint_id=folder, no_dist=True)
