"""Headers travel on a channel of their own, where a communicator has one for host memory."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from tests.core.runtime.plans import Cut, Cuts

from shardwright import InvalidInputError, KeyedJaggedTensor, RowsModulo, ShardingEnv
from shardwright_plugins.pipeline.train_pipeline import lockstep_batches
from shardwright_testing.simulated import SimulatedCommunicator, _Board, run_simulated

WORLD_SIZE = 2


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
