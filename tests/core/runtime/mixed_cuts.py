"""A collection of tables cut in several ways, on simulated ranks."""

from __future__ import annotations

import torch
from tests.core.runtime.plans import RATE, Cut, Cuts, RowsMirrored

from shardwright import KeyedJaggedTensor, RowsRange
from shardwright_testing import run_simulated

MIXED = (
    Cut(11, 4, ("a",), "SUM", RowsRange(11, parts=2), (), (0, 1)),
    Cut(9, 6, ("b", "a"), "MEAN", None, (2, 4), (1, 0), "loop_by_sample"),
    Cut(7, 3, ("b",), "MEAN", RowsMirrored(7, 3), (1,), (0, 1, 1)),
)


def case_of(**options):
    return Cuts(MIXED, 2, **options)


def simulate(case, work, *, timeout_s=60.0):
    """Call `work(sharded, batch, env)` on each rank; the batch is the rank's first."""
    module = case.module()
    return run_simulated(
        lambda env: work(case.shard(env, module), case.batch(2 + env.rank, seed=env.rank), env),
        case.world_size,
        timeout_s=timeout_s,
    )


def unsharded(case):
    """The unsharded output for each rank's first batch."""
    return [
        case.module()(case.batch(2 + rank, seed=rank)).values().detach() for rank in range(case.world_size)
    ]


def with_parts(batch, **changes):
    parts = {
        "keys": batch.keys(),
        "values": batch.values(),
        "lengths": batch.lengths(),
        "weights": batch.weights_or_none(),
        **changes,
    }
    return KeyedJaggedTensor(**parts)


def sharded_weights(work, case=None):
    def run(sharded, batch, env):
        work(sharded, batch, env)
        return sharded.full_state_dict()

    return simulate(case or case_of(), run)[0]


def unsharded_weights(loss_of, case=None):
    """Weights after one step of SGD on the mean of `loss_of(module, batch, rank)`."""
    case = case or case_of()
    module = case.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for rank in range(case.world_size):
        (loss_of(module, case.batch(2 + rank, seed=rank), rank) / case.world_size).backward()
    optimizer.step()
    return module.state_dict()
