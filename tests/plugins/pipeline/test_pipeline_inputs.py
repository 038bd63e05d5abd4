"""Where train pipelines find the inputs of collections in a batch; simulated ranks."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tests.errors import error_of
from tests.plugins.pipeline.pipelines import (
    SHARDERS,
    Fails,
    assert_same,
    bags,
    batches,
    on_ranks,
    piped,
    run_out,
    towers,
    train_plainly,
)
from torch import nn

from shardwright import (
    DistributedModelParallel,
    EmbeddingModuleShardingPlan,
    ShardingPlan,
    TrainPipelineSparseDist,
)
from shardwright_testing.simulated import run_simulated


class OfForm(nn.Module):
    """A collection whose input is taken from the batch by a function."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self.bags, self.take = bags(2).module(), take
        self.over = nn.Linear(20, 1)

    def forward(self, batch: Any) -> Any:
        output = self.over(self.bags(self.take(batch)).values())
        return output.square(), output.detach()


def made(kind: Any = OfForm, take: Any = None) -> nn.Module:
    """Not in the ranks' threads, which share one generator."""
    torch.manual_seed(2)
    return kind(take)


def shard_bags(model: nn.Module, env: Any) -> DistributedModelParallel:
    plan = ShardingPlan({"bags": EmbeddingModuleShardingPlan(bags(2).shardings())})
    return DistributedModelParallel(copy.deepcopy(model), env=env, device="cpu", plan=plan, sharders=SHARDERS)


FORMS = {
    "itself": (lambda features: features, lambda batch: batch),
    "pair": (lambda features: (torch.ones(2), features), lambda batch: batch[1]),
    "dict": (lambda features: {"x": [None, {"y": features}]}, lambda batch: batch["x"][1]["y"]),
    "moved in the model": (lambda features: features, lambda batch: batch.to("cpu")),
}
MADE = (lambda features: features, lambda batch: batch.permute([1, 0]))


def train_form(form: Any, kind: Any) -> list[tuple[list[str], Any]]:
    """On each rank: the labels of its collectives, and the state, after four steps."""
    make, take = form
    model = made(take=take)

    def train(env):
        sharded = shard_bags(model, env)
        loader = iter([make(bags(2).batch(3, seed=10 * step + env.rank)) for step in range(4)])
        if kind is None:
            train_plainly(sharded, loader)
        else:
            assert len(run_out(piped(sharded, kind), loader)) == 4
        return env.communicator.labels, sharded.full_state_dict()

    return run_simulated(train, 2)


@pytest.mark.parametrize("form", FORMS)
def test_input_is_found_in_batches_of_any_form(form):
    results, plain = train_form(FORMS[form], TrainPipelineSparseDist), train_form(FORMS[form], None)
    for (labels, actual), (_, expected) in zip(results, plain, strict=True):
        assert_same(actual, expected)
        assert (
            labels.count("status") == 4
        )  # before the first batch; then after each forward pass that began the next
        assert labels.count("headers") == 5  # four batches and the end


def test_input_that_the_model_makes_is_exchanged_in_the_forward_pass_which_is_logged(caplog):
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        results = train_form(MADE, TrainPipelineSparseDist)
    for (labels, actual), (_, expected) in zip(results, train_form(MADE, None), strict=True):
        assert_same(actual, expected)
        assert labels.count("headers") == 4
    assert [record.getMessage() for record in caplog.records] == [
        "the input of 'bags' is not in the batch, or stands elsewhere on other ranks (the model makes it): its ids are "
        "exchanged in the forward pass, not ahead of it"
    ] * 2


def test_model_that_takes_another_input_on_one_rank_raises_on_all_and_the_next_step_trains():
    whole = made(take=lambda batch: batch[0])

    def train(env):
        model = shard_bags(whole, env)
        loader = iter([[bags(2).batch(2, seed=step), bags(2).batch(2, seed=50)] for step in range(4)])
        pipeline = piped(model)
        texts = []
        for step in range(4):
            is_odd = env.rank == 1 and step == 2
            model.module.take = (lambda batch: batch[1]) if is_odd else (lambda batch: batch[0])
            texts.append(error_of(pipeline.progress, loader))
        return texts

    first, second = run_simulated(train, 2)
    assert second.pop(2).startswith(
        "DistributedError: the exchange of the ids that stand where the first batch had"
    )
    assert first.pop(2).startswith("DistributedError: rank 1 failed in the forward pass")
    assert first == second == ["nothing was raised"] * 3


def test_model_that_leaves_a_collection_out_raises_on_all():
    class Lazy(Fails):
        def forward(self, batch):
            if batch.name.startswith("2 "):
                output = self.over(torch.cat([torch.zeros(len(batch.dense), 20), batch.dense], 1))
                return output.square(), output
            return super().forward(batch)

    def train(model, env):
        pipeline, loader = piped(model), batches(4, env.rank, 2)
        return [error_of(pipeline.progress, loader) for _ in range(4)]

    for texts in on_ranks(train, 2, Lazy(towers(2), "")):
        assert texts.pop(2).startswith(
            "DistributedError: the collection at 'bags' was called in the first forward"
        )
        assert texts == ["nothing was raised"] * 3


def test_batch_of_another_form_raises_on_all_with_the_place():
    whole = made(take=lambda batch: batch["x"])

    def train(env):
        model = shard_bags(whole, env)
        loader = iter(
            [
                {"x": bags(2).batch(2)},
                {"y": 0} if env.rank else {"x": bags(2).batch(2)},
                {"x": bags(2).batch(2)},
            ]
        )
        pipeline = piped(model)
        return [error_of(pipeline.progress, loader) for _ in range(3)]

    first, second = run_simulated(train, 2)
    assert (
        "had the input of a collection at batch['x'], where this batch has none (KeyError: 'x')"
        in second.pop(1)
    )
    assert "rank 1" in first.pop(1)
    assert first == second == ["nothing was raised"] * 2


def test_collection_called_twice_with_two_inputs_sends_both_ahead():
    class Twice(OfForm):
        def forward(self, batch):
            output = sum(self.over(self.bags(features).values()).sum() for features in batch)
            return output, output.detach()

    whole = made(Twice)

    def train(env, kind):
        model = shard_bags(whole, env)
        loader = iter(
            [[bags(2).batch(2, seed=100 * step + 10 * i + env.rank) for i in range(2)] for step in range(3)]
        )
        if kind is None:
            train_plainly(model, loader)
        else:
            run_out(piped(model, kind), loader)
        return model.full_state_dict()

    results = run_simulated(lambda env: train(env, TrainPipelineSparseDist), 2)
    for actual, expected in zip(results, run_simulated(lambda env: train(env, None), 2), strict=True):
        assert_same(actual, expected)
