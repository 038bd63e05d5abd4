"""Two collections over the same ranks, called, waited for and gone back through in different orders."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from tests.core.runtime.mixed_cuts import with_parts
from tests.core.runtime.plans import Cut, Cuts

from shardwright.errors import DistributedError
from shardwright.runtime.ranks.lockstep import Lockstep
from shardwright.runtime.ranks.together import by_rank
from shardwright_testing.simulated import run_simulated

FIRST = Cuts([Cut(7, 4, ("a",)), Cut(5, 4, ("b",), ranks=(1,))], 2)
SECOND = Cuts([Cut(7, 4, ("a",), ranks=(1,)), Cut(5, 4, ("b",))], 2)


def simulate(work, cases=(FIRST, SECOND)):
    """Call `work(env, collections, batches)` on two ranks; batches of both collections are of one size."""
    modules = [case.module() for case in cases]

    def run(env):
        sharded = [case.shard(env, module) for case, module in zip(cases, modules, strict=True)]
        return work(env, sharded, [case.batch(3, seed=env.rank) for case in cases])

    return run_simulated(run, 2)


@pytest.mark.parametrize("trained", [(True, True), (True, False)], ids=["both ranks", "one rank"])
def test_weights_of_ids_get_their_gradients_wherever_ranks_wait_for_outputs(trained):
    cases = [evolve(case, is_weighted=True) for case in (FIRST, SECOND)]

    def weighted(batches, is_trained):
        weights = [batch.weights().clone().requires_grad_(is_trained) for batch in batches]
        return weights, [with_parts(own, weights=of) for own, of in zip(batches, weights, strict=True)]

    def work(env, sharded, batches):
        weights, batches = weighted(batches, trained[env.rank])
        if env.rank == 0:  # it waits for the first outputs before it calls the second collection
            first, second = (own(batch).values() for own, batch in zip(sharded, batches, strict=True))
        else:
            outputs = [own(batch) for own, batch in zip(sharded, batches, strict=True)]
            first, second = (own.values() for own in outputs)
        (first.square().sum() + second.square().sum()).backward()
        return [own.grad for own in weights]

    for rank, found in enumerate(simulate(work, cases)):
        weights, batches = weighted([case.batch(3, seed=rank) for case in cases], True)
        for case, batch in zip(cases, batches, strict=True):
            case.module()(batch).values().square().sum().backward()
        expected = [own.grad if trained[rank] else None for own in weights]
        torch.testing.assert_close(found, expected)


def test_collections_called_in_different_orders_are_an_error_on_all_ranks():
    def work(env, sharded, batches):
        first = env.rank  # rank 1 begins with the second
        with pytest.raises(DistributedError) as error:
            sharded[first](batches[first])
        return str(error.value)

    larger = Cuts([Cut(7, 4, tuple("abcd"))], 2)
    for cases in ((FIRST, larger), (larger, FIRST)):
        texts = simulate(work, cases)
        assert texts[0] == texts[1]
        expected = ["the tables 't0'" if case is larger else "the tables 't0', 't1'" for case in cases]
        calls = [f"rank {rank}: headers of {name}" for rank, name in enumerate(expected)]
        assert f"different calls: {calls[0]}; {calls[1]}. Every rank must" in texts[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rank_that_evaluates_alone_is_told_on_all_ranks(mode):
    def work(env, sharded, batches):
        with pytest.raises(DistributedError) as error, mode() if env.rank == 0 else nullcontext():
            sharded[0](batches[0])
        return str(error.value)

    texts = simulate(work)
    assert texts[0] == texts[1]
    name = "headers of the tables 't0', 't1'"
    assert f"different calls: rank 0: {name} without gradients; rank 1: {name}. Every rank must" in texts[0]


def test_backward_passes_in_different_orders_are_an_error_on_all_ranks_with_the_next_batch():
    def work(env, sharded, batches):
        losses = [
            collection(batch).values().sum() for collection, batch in zip(sharded, batches, strict=True)
        ]
        for index in (0, 1) if env.rank else (1, 0):
            losses[index].backward()
        with pytest.raises(DistributedError) as error:
            sharded[0](batches[0])
        return str(error.value)

    texts = simulate(work, (FIRST, FIRST))  # gradients of one size: nothing else tells them apart
    assert texts[0] == texts[1]
    assert "the weights are wrong: rank 0: headers of the tables 't0', 't1', headers of" in texts[0]
    one, two = "gradients of the tables 't0', 't1'", "gradients of the tables 't0', 't1' (no. 2)"
    assert f"{two}, {one}, headers" in texts[0].split("rank 1: ")[0]
    assert f"{one}, {two}, headers" in texts[0].split("rank 1: ")[1]


@pytest.mark.parametrize("garbage", [0, -1, 2**62, 0x53_48_52_43 << 32 | 7])
def test_header_that_is_none_is_an_error_naming_its_rank_without_a_collective(garbage):
    lockstep = Lockstep()
    noted = lockstep.note("headers of 'one'")
    communicator = SimpleNamespace(global_ranks=(0, 1))
    with pytest.raises(DistributedError, match=r"what arrived from rank 1 .* is no header.*headers of 'one'"):
        lockstep.check([lockstep.word, garbage], noted, communicator)


def test_ranks_are_named_in_runs_of_one_text():
    assert by_rank(["x.", "y.", "x."]) == "ranks 0, 2: x; rank 1: y."
    assert by_rank(["x"], [3], between=" ") == "rank 3 x"
    assert by_rank(["a.; b.", "a.; c."]) == "rank 0: a.; b; rank 1: a.; c."


@pytest.mark.parametrize("waited_for", [False, True])
def test_step_is_let_go_with_its_output(waited_for):
    def work(env, sharded, batches):
        step = sharded[0].compute(sharded[0].input_dist(batches[0]))
        output, seen = sharded[0].output_dist(step), weakref.ref(step)
        del step
        if waited_for:
            output = output.values()
        alive = seen() is not None
        del output
        return alive, seen() is None

    gc.disable()  # no cycle is left to be found
    try:
        assert simulate(work) == [(True, True)] * 2
    finally:
        gc.enable()
