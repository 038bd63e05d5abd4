"""What of a backward pass is under way while dense layers compute, and in which order gradients leave."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from tests.core.runtime.plans import Cut, Cuts
from tests.plugins.pipeline.pipelines import Watched
from torch import nn

from shardwright.planning.layouts.row_maps import RowsModulo
from shardwright_plugins.dataflows import Hierarchical, Replicate
from shardwright_testing.simulated import run_simulated

WORLD_SIZE = 2
DENSE, OVER = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 8)), nn.Linear(16, 1)


def case_of(feature: str = "a") -> Cuts:
    ranks = tuple(range(WORLD_SIZE))
    return Cuts(
        [
            Cut(11, 4, (feature,), "SUM", RowsModulo(11, parts=WORLD_SIZE), (), ranks),
            Cut(7, 2, (feature,), "SUM", ranks=ranks, dataflow=Replicate()),
            Cut(8, 2, (feature,), "SUM", RowsModulo(8, parts=WORLD_SIZE), (), ranks, dataflow=Hierarchical()),
        ],
        WORLD_SIZE,
    )


class WithDense(nn.Module):
    """A collection beside two dense layers, which are called before it or after."""

    def __init__(self, sparse: Any, *, dense_first: bool) -> None:
        super().__init__()
        self.sparse, self._dense_first = sparse, dense_first
        self.dense, self.over = copy.deepcopy(DENSE), copy.deepcopy(OVER)

    def forward(self, features: Any, values: torch.Tensor) -> torch.Tensor:
        if self._dense_first:
            below = self.dense(values)
            pooled = self.sparse(features)
        else:
            pooled = self.sparse(features)
            below = self.dense(values)
        return self.over(torch.cat([below, pooled.values()], 1)).sum()


def note_backward(model: WithDense, events: list[tuple[str, str]]) -> None:
    for name, module in (("dense", model.dense[0]), ("over", model.over)):
        parameter = module.weight  # the last of its backward pass
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: events.append(("backward of", name))
        )


@pytest.mark.parametrize("dense_first", [False, True])
def test_gradients_are_under_way_while_dense_layers_go_backward(dense_first):
    case = case_of()

    def work(env):
        model = WithDense(case.shard(env, case.module()), dense_first=dense_first)
        seen = []
        for step in range(3):
            watched = Watched(env.communicator)
            note_backward(model, watched.events)
            loss = model(case.batch(3, seed=10 * step + env.rank), torch.rand(3, 3))
            watched.events.clear()
            loss.backward()
            seen.append(watched.events)
        return seen

    for rank in run_simulated(work, WORLD_SIZE, local_world_size=1):
        for events in rank:
            first_wait = next(place for place, (kind, _) in enumerate(events) if kind == "wait")
            before = events[:first_wait]
            assert ("backward of", "dense") in before
            sent = {what for kind, what in before if kind == "start"}
            assert sent >= {"gradients", "gradients across hosts"}
            assert before.index(("start", "gradients")) < before.index(("backward of", "dense"))


@pytest.mark.parametrize("used", ["ab", "ba"])
def test_gradients_of_several_lookups_leave_in_one_order_whatever_order_they_are_used_in(used):
    cases = {name: case_of(name) for name in "ab"}

    def work(env):
        collections = {name: case.shard(env, case.module()) for name, case in cases.items()}
        for step in range(2):
            results = {
                name: collections[name](case.batch(2, seed=env.rank + step)) for name, case in cases.items()
            }
            # Every other rank uses them the other way round; the sum's backward pass reaches the last one first.
            order = used if env.rank else used[::-1]
            total = torch.zeros(())
            for place, name in enumerate(order):
                total = (total + results[name].values().sum()) * (place + 1)
            total.backward()
        return {name: own.full_state_dict() for name, own in collections.items()}

    states = run_simulated(work, WORLD_SIZE, local_world_size=1)
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


def test_a_lookup_whose_gradients_never_come_does_not_hold_up_the_others():
    case = case_of()

    def work(env):
        sharded = case.shard(env, case.module())
        kept = sharded(case.batch(2, seed=5)).values()  # with gradients, and never gone back through
        sharded(case.batch(2, seed=env.rank)).values().sum().backward()
        later = sharded(case.batch(2, seed=env.rank + 7)).values()
        values = sharded(case.batch(2, seed=env.rank + 9)).values()
        values.sum().backward()
        return kept.shape, later.shape, sharded.full_state_dict()

    results = run_simulated(work, WORLD_SIZE)
    assert all(torch.equal(results[0][2][name], value) for name, value in results[1][2].items())


def test_a_kept_loss_keeps_nothing_of_its_step():
    case = case_of()

    def work(env):
        sharded = case.shard(env, case.module())
        awaitable = sharded(case.batch(2, seed=env.rank))
        loss = awaitable.values().sum()
        steps = [
            weakref.ref(own)
            for own in gc.get_objects()
            if type(own).__name__ == "EngineStep" and own._engine is sharded.engine
        ]
        del awaitable
        loss.backward()
        return [step() for step in steps], loss.grad_fn is not None

    for alive, _ in run_simulated(work, WORLD_SIZE):
        assert alive == [None]
