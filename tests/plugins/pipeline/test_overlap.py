"""What of a step is under way at once, and in which order: results, gradients beside dense layers, and headers."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from attrs import evolve
from tests.core.runtime.plans import Cut, Cuts
from tests.plugins.pipeline.pipelines import Watched, bags
from torch import nn

from shardwright import InvalidInputError, KeyedJaggedTensor, RowsModulo, ShardingEnv
from shardwright_plugins.dataflows import Hierarchical, Replicate
from shardwright_plugins.pipeline.train_pipeline import lockstep_batches
from shardwright_testing.simulated import SimulatedCommunicator, _Board, run_simulated

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


def events_of_a_step(
    world_size: int = 4, local_world_size: int = 2, *, turned: bool = False
) -> list[list[tuple[str, str]]]:
    """A forward and a backward pass of tables with three dataflows; ``turned``: the last table is the first."""
    case = bags(world_size)
    if turned:
        case = evolve(case, tables=case.tables[::-1])
    module = case.module()

    def step(env):
        sharded = case.shard(env, module)
        watched = Watched(env.communicator)
        values = sharded(case.batch(3, seed=env.rank)).values()
        watched.events.append(("backward", ""))
        values.backward(torch.ones_like(values))
        return watched.events

    return run_simulated(step, world_size, local_world_size=local_world_size)


@pytest.mark.parametrize("turned", [False, True])
def test_results_of_all_ways_home_are_under_way_before_any_is_waited_for(turned):
    ways = [("start", "results"), ("start", "results inside the host")]
    for events in events_of_a_step(turned=turned):
        forward = events[events.index(("wait", "ids")) + 1 : events.index(("backward", ""))]
        assert sorted(forward[:2]) == ways
        last_start = forward.index(("start", "results across hosts"))
        assert [event for event in forward[:last_start] if event[0] == "wait"] == [
            ("wait", "results inside the host")
        ]
        assert ("wait", "results") in forward[last_start:]


def test_gradients_of_all_ways_and_of_copies_are_under_way_before_any_is_waited_for():
    for events in events_of_a_step():
        backward = events[events.index(("backward", "")) + 1 :]
        assert backward[:3] == [
            ("start", "gradients"),
            ("start", "gradients across hosts"),
            ("start", "dense gradients"),  # of copies
        ]
        assert backward[3][0] == "wait"


class Device(SimulatedCommunicator):
    """One that has another beside it, as NCCL's has gloo's."""

    def __init__(self, own: SimulatedCommunicator, beside: SimulatedCommunicator) -> None:
        super().__init__(own._board, own.rank, own.world_size)
        self._beside = beside

    def on_cpu(self) -> SimulatedCommunicator:
        return self._beside


def with_channel(env: ShardingEnv, board: _Board) -> tuple[ShardingEnv, Device, SimulatedCommunicator]:
    """The environment with a channel of its own for headers."""
    own = env.communicator
    assert isinstance(own, SimulatedCommunicator)
    beside = SimulatedCommunicator(board, own.rank, own.world_size)
    device = Device(own, beside)
    return evolve(env, communicator=device), device, beside


def case() -> Cuts:
    return Cuts(
        [Cut(11, 4, ("a",), "SUM", RowsModulo(11, parts=WORLD_SIZE), (), tuple(range(WORLD_SIZE)))],
        WORLD_SIZE,
    )


def test_headers_and_status_words_go_beside_what_the_device_sends():
    board, own = _Board(WORLD_SIZE, 20.0), case()

    def work(env):
        env, device, beside = with_channel(env, board)
        sharded = own.shard(env, own.module())
        first = len(device.labels)
        sharded(own.batch(3, seed=env.rank)).values().sum().backward()
        sent = device.labels[first:], list(beside.labels)
        for _ in lockstep_batches(sharded, iter([own.batch(2, seed=env.rank)])):
            pass
        return *sent, beside.labels

    for labels, beside, later in run_simulated(work, WORLD_SIZE):
        assert labels == ["ids", "results", "gradients"]
        assert beside == ["headers"]
        assert "status" in later


def test_wrong_batch_is_named_on_all_ranks_by_headers_that_go_beside():
    board, own = _Board(WORLD_SIZE, 20.0), case()

    def work(env):
        env, device, _ = with_channel(env, board)
        sharded = own.shard(env, own.module())
        first = len(device.labels)
        ids = torch.tensor([99 if env.rank else 1])
        with pytest.raises(InvalidInputError, match=r"rank 1: .*has the id 99"):
            sharded(KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([1])))
        return [label for label in device.labels[first:] if label != "object"]

    assert run_simulated(work, WORLD_SIZE) == [[], []]
