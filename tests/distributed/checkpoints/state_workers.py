"""What ranks do whose state dicts are asked for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.distributed import workers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardwright.optim.combined import CombinedOptimizer

ADAM = {"optimizer": "adam", "learning_rate": workers.LEARNING_RATE}


def trained(types: list[str], fused_params: dict[str, Any] = ADAM) -> tuple[Any, CombinedOptimizer]:
    """A model after a step, and its optimizer."""
    model = workers.wrap(workers.clicks(), types, fused_params)
    optimizer = workers.optimizers_of(model)
    workers.train(model, 0, dist.get_rank(), optimizer)
    return model, optimizer


def whole_by_torch(types: list[str]) -> list[dict[str, Any]]:
    """The whole state, as torch's function and as the model gives it."""
    model, _ = trained(types, workers.FUSED)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return [get_model_state_dict(model, options=options), model.full_state_dict()]


def saved_by_torch(types: list[str], folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save the sharded state dicts by DCP; give the whole ones."""
    model, _ = trained(types)
    dcp.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=folder
    )
    return model.full_state_dict(), model.fused_optimizer.full_state_dict()["state"]


def loaded_by_torch(types: list[str], folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load by DCP into the sharded state dicts of other ranks; give the whole ones."""
    model = workers.wrap(workers.clicks(7), types, ADAM)
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    return model.full_state_dict(), model.fused_optimizer.full_state_dict()["state"]
