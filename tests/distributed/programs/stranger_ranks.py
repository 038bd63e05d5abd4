"""What ranks with the stranger's plugin do; importable by their processes."""

from __future__ import annotations

import sys

import torch
from attrs import frozen
from tests.distributed import workers
from torch import distributed as dist


@frozen
class Trained:
    """What one rank has after training: its plan as a document, its state, and how the model prints."""

    document: str
    state: dict[str, torch.Tensor]
    anatomy: str


def find_plugins_in(site: str) -> None:
    """Put the folder on the path before anything asks for a plugin."""
    sys.path.insert(0, site)


def plan_and_train(types: list[str], steps: int) -> Trained:
    model = workers.wrap(workers.clicks(), types)
    optimizer = workers.optimizers_of(model)
    for step in range(steps):
        workers.train(model, step, dist.get_rank(), optimizer)
    return Trained(model.plan.to_json(), model.full_state_dict(), str(model))
