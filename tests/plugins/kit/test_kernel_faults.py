"""The kit names what is wrong with an update, beside plain torch that has the fault."""

from __future__ import annotations

import pytest
import torch

from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright_testing.kernels.kernel_faults import updates_look_like
from shardwright_testing.kernels.loops import Batch, Loops, block_spec

RATE = 0.1
BAGS = [[(0, 2.0), (1, 3.0)], [(1, -1.0), (2, 4.0), (2, 5.0)], []]
IDS, WEIGHTS = (torch.tensor([pair[place] for bag in BAGS for pair in bag]) for place in (0, 1))
BAG_OF = torch.tensor([0, 0, 1, 1, 1])
GRADIENT = torch.arange(1.0, 13.0)
OF_EACH = GRADIENT.view(3, 4)[BAG_OF].double()


def lengths() -> torch.Tensor:
    return torch.tensor([2.0, 3.0])[BAG_OF, None]


@pytest.mark.parametrize(
    ("step", "adds", "told"),
    [
        (OF_EACH * WEIGHTS[:, None], True, ""),
        (OF_EACH, True, "the weights of ids are lost: this is the update without them. "),
        (OF_EACH * WEIGHTS[:, None] / lengths(), True, "this is the update of means; "),
        (
            OF_EACH * WEIGHTS[:, None],
            False,
            "of an id that is in the batch more than once, only the last counts. ",
        ),
        (OF_EACH * 0, True, "nothing was updated. "),
        (OF_EACH * 7, True, ""),
    ],
    ids=["right", "no weights", "means", "assigned by index", "not at all", "unknown"],
)
def test_updates_look_like_names_the_fault(step: torch.Tensor, adds: bool, told: str) -> None:
    spec = block_spec(4, 4, optimizer=OptimizerSpec("sgd", RATE))
    before = Loops([spec], [torch.arange(16, dtype=torch.float64).view(4, 4)], batch_major=False)
    weight = before.weights[0].clone()
    if adds:
        weight.index_add_(0, IDS, step, alpha=-RATE)
    else:
        weight[IDS] -= RATE * step
    found = updates_look_like(weight, 0, before, Batch([[BAGS]], is_weighted=True), GRADIENT, RATE)
    assert found.startswith(told)
    assert bool(found) == bool(told)
    assert torch.equal(before.weights[0], torch.arange(16, dtype=torch.float64).view(4, 4))
