"""Simulated ranks: they exchange what real ones do, and a rank that fails leaves nobody waiting."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from shardwright.errors import DistributedError
from shardwright_testing.simulated import run_simulated


def test_other_collectives_give_all_ranks_the_same():
    def work(env):
        communicator = env.communicator
        tensor = torch.full((2,), float(env.rank))
        communicator.broadcast(tensor, 1)
        communicator.barrier()
        return (
            tensor.tolist(),
            communicator.all_gather_objects(env.rank),
            communicator.broadcast_object(env.rank, 2),
        )

    expected = ([1.0, 1.0], [0, 1, 2], 2)
    assert run_simulated(work, 3) == [expected] * 3


def test_labels_list_the_collectives_in_order():
    def work(env):
        communicator = env.communicator
        communicator.all_to_all(torch.empty(0), torch.empty(0), [0, 0], [0, 0], label="first").wait()
        communicator.all_gather_objects(1)
        communicator.broadcast(torch.ones(1), 0)
        communicator.barrier()
        return communicator.labels

    assert run_simulated(work, 2) == [["first", "object", "tensor", "barrier"]] * 2


def test_results_are_the_senders_copies():
    def work(env):
        own = torch.ones(2) * env.rank
        env.communicator.broadcast(own, 1)
        if env.rank == 1:
            own.fill_(9)
        env.communicator.barrier()
        return own.tolist()

    assert run_simulated(work, 2) == [[1.0, 1.0], [9.0, 9.0]]


def test_ranks_in_different_collectives_raise_with_both_labels():
    def work(env):
        label = "ids" if env.rank else "headers"
        env.communicator.all_to_all(torch.empty(2), torch.ones(2), [1, 1], [1, 1], label=label)

    with pytest.raises(DistributedError, match=r"different collectives: \['headers', 'ids'\]"):
        run_simulated(work, 2)


def test_sizes_that_do_not_agree_raise_with_both():
    def work(env):
        splits = [1, 2] if env.rank else [1, 1]
        env.communicator.all_to_all(torch.empty(sum(splits)), torch.ones(2), splits, [1, 1], label="ids")

    with pytest.raises(DistributedError, match=r"rank 1, ids: expects \[1, 2\], was sent \[1, 1\]"):
        run_simulated(work, 2)


def test_rank_that_fails_ends_the_others_at_once_and_its_error_is_raised():
    def work(env):
        if env.rank == 1:
            raise KeyError("no such feature")
        env.communicator.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="no such feature"):
        run_simulated(work, 3, timeout_s=60)
    assert time.monotonic() - start < 30


def test_rank_that_does_not_come_is_an_error_after_the_time_out():
    def work(env):
        if env.rank == 0:
            env.communicator.barrier()

    with pytest.raises(DistributedError, match="simulated rank 0: another rank failed or did not come"):
        run_simulated(work, 2, timeout_s=0.2)


@pytest.mark.parametrize("enabled", [True, False])
def test_ranks_have_the_callers_gradient_mode_and_threads_are_gone_after(enabled):
    before = threading.active_count()
    with torch.set_grad_enabled(enabled):
        assert run_simulated(lambda env: torch.is_grad_enabled(), 2) == [enabled] * 2
    assert threading.active_count() == before
