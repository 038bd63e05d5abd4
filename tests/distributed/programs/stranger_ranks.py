"""What ranks with the stranger's plugin do; importable by their processes."""

from __future__ import annotations

import sys

import torch
from tests.distributed import workers
from torch import distributed as dist


def find_plugins_in(site: str) -> None:
    """Put the folder on the path before anything asks for a plugin."""
    sys.path.insert(0, site)


def plan_and_train(types: list[str], steps: int) -> tuple[str, dict[str, torch.Tensor]]:
    """Train; what one rank has then: its plan as a document, and its state."""
    model = workers.wrap(workers.clicks(), types)
    optimizer = workers.optimizers_of(model)
    for step in range(steps):
        workers.train(model, step, dist.get_rank(), optimizer)
    return model.plan.to_json(), model.full_state_dict()
