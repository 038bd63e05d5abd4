"""What ranks do whose state dicts are asked for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.distributed import workers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardwright.optim.combined import CombinedOptimizer

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)


ADAM = {"optimizer": "adam", "learning_rate": workers.LEARNING_RATE}


def trained(types: list[str], fused_params: dict[str, Any] = ADAM) -> tuple[Any, CombinedOptimizer]:
    """A model after a step, and its optimizer."""
    model = workers.wrap(workers.clicks(), types, fused_params)
    optimizer = workers.optimizers_of(model)
    workers.train(model, 0, dist.get_rank(), optimizer)
    return model, optimizer


def asked_by_a_logger(types: list[str]) -> dict[str, Any]:
    """One rank alone asks for the state dicts of the model and of its optimizer."""
    model, _ = trained(types)
    if dist.get_rank():
        return {}
    communicator = model.env.communicator
    with (
        mock.patch.multiple(
            dist,
            **{
                name: mock.Mock(side_effect=AssertionError(name))
                for name in COLLECTIVES
                if hasattr(dist, name)  # not every torch has all
            },
        ),
        mock.patch.object(type(communicator), "broadcast", side_effect=AssertionError("broadcast")),
        mock.patch.object(type(communicator), "broadcast_object", side_effect=AssertionError("broadcast")),
    ):
        state, sparse = model.state_dict(), model.fused_optimizer.state_dict()["state"]
    own = {parameter.data_ptr() for parameter in model.parameters() if parameter.numel()}
    shards = {
        name: [values for _, values in value.blocks]
        for name, value in state.items()
        if hasattr(value, "blocks")
    }
    return {
        "shapes": {name: tuple(value.shape) for name, value in state.items()},
        "states": {
            name: {entry: tuple(value.shape) for entry, value in own.items()} for name, own in sparse.items()
        },
        "here": {name: sum(values.numel() for values in own) for name, own in shards.items()},
        "shared": all(values.data_ptr() in own for each in shards.values() for values in each),
    }


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


def load_what_one_rank_has_wrong(types: list[str], *, of_optimizer: bool) -> list[str]:
    """Load state of a wrong shape on rank 1 alone, whole and sharded; the classes of errors, and go on."""
    model, optimizer = trained(types)
    kinds = []
    for state in (model.state_dict(), model.full_state_dict()):
        states = model.fused_optimizer.full_state_dict()
        if dist.get_rank() == 1:
            name = next(iter(states["state"]))
            states["state"][name]["exp_avg"] = torch.zeros(1, 1)
            state[name] = torch.zeros(1, 1)
        try:
            if of_optimizer:
                model.fused_optimizer.load_state_dict(states)
            else:
                model.load_state_dict(state)
            kinds.append("")
        except Exception as error:
            kinds.append(type(error).__name__)
    workers.train(model, 1, dist.get_rank(), optimizer)
    return kinds


def saved_by_pickle(types: list[str], path: str) -> str:
    """The error of `torch.save`."""
    model, _ = trained(types)
    try:
        torch.save(model.state_dict(), f"{path}/{dist.get_rank()}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
