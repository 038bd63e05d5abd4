"""What is wrong with one rank's batch is told on all; simulated ranks."""

from __future__ import annotations

import re

import pytest
import torch
from tests.core.runtime.mixed_cuts import MIXED, case_of, simulate, with_parts
from tests.core.runtime.plans import (
    Cuts,
    Loop,
)

from shardwright.errors import IdRangeError, InvalidInputError


def of_a_negative_length(batch):
    lengths = batch.lengths().clone()
    lengths[0] = -1
    return with_parts(batch, lengths=lengths)


A = r"rank 1: feature 'a' of table 't1' \(9 x 6 FP32\): "


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda batch: torch.ones(3), "rank 1: a sharded collection takes a KeyedJaggedTensor, got Tensor$"),
        (lambda batch: batch.to("meta"), f"{A}the KeyedJaggedTensor is on 'meta'"),
        (of_a_negative_length, rf"{A}.*lengths\[0\] \(key 'b', example 0\) is -1"),
    ],
    ids=["no batch", "no ids", "bags that do not fit the ids"],
)
def test_batch_that_cannot_be_read_on_one_rank_is_the_same_error_on_all_and_the_next_step_works(spoil, text):
    def work(sharded, batch, env):
        with pytest.raises(InvalidInputError) as error:
            sharded(spoil(batch) if env.rank else batch)
        return str(error.value), sharded(batch).values().shape

    (first, one), (second, other) = simulate(case_of(), work)
    assert first == second
    assert re.match(text, first), first
    assert (one, other) == ((2, 19), (3, 19))


def test_problems_of_several_ranks_are_all_told():
    def work(sharded, batch, env):
        values = batch.values().clone()
        values[:] = 2**62 if env.rank else -1
        with pytest.raises(IdRangeError) as error:
            sharded(with_parts(batch, values=values))
        with pytest.raises(InvalidInputError) as other:
            sharded(None if env.rank else with_parts(batch, values=values))
        assert not isinstance(other.value, IndexError)
        return str(error.value)

    texts = simulate(Cuts(MIXED, 2), work)
    assert texts[0] == texts[1]
    assert "rank 0: feature 'a' of table 't1' (9 x 6 FP32) has the id -1 at position 0" in texts[0]
    assert "rank 1: feature 'a' of table 't1' (9 x 6 FP32) has the id 4611686018427387904" in texts[0]


def test_weights_that_a_kernel_cannot_train_are_refused_on_all_ranks(monkeypatch):
    monkeypatch.setattr(Loop, "refusal_of_weight_gradients", lambda self: "nobody taught it")

    def work(sharded, batch, env):
        with pytest.raises(InvalidInputError) as error:
            sharded(with_parts(batch, weights=batch.weights().requires_grad_()) if env.rank else batch)
        with torch.no_grad():  # looked up they may be
            sharded(with_parts(batch, weights=batch.weights().requires_grad_()))
        return str(error.value)

    for text in simulate(case_of(is_weighted=True), work):
        assert text.startswith(
            "rank 1: table 't0' (11 x 4 FP32): the weights of ids require gradients, which"
        )
        assert "compute kernel 'loop' does not give: nobody taught it. detach() them" in text
