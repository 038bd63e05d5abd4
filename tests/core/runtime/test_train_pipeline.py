"""Train pipelines on simulated ranks: equal to the plain loop, in step, and nobody hangs."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tests.core.runtime.pipelines import (
    SHARDERS,
    Watched,
    assert_same,
    bags,
    batches,
    dense_optimizer,
    examples,
    run_out,
    shard,
    towers,
    train_plainly,
)
from torch import nn

from shardwright import DistributedModelParallel, TrainPipelineBase, TrainPipelineSparseDist
from shardwright.errors import InvalidInputError
from shardwright.planning.plan import EmbeddingModuleShardingPlan, ShardingPlan
from shardwright.testing.simulated import run_simulated

PIPELINES = [TrainPipelineSparseDist, TrainPipelineBase]


def on_ranks(work: Any, world_size: int, model: nn.Module | None = None, **options: Any) -> list[Any]:
    """Call `work(sharded, env)` on every rank."""
    whole = model or towers(world_size)
    return run_simulated(
        lambda env: work(shard(whole, env, world_size), env), world_size, timeout_s=20.0, **options
    )


def piped(model: Any, kind: Any = TrainPipelineSparseDist, **options: Any) -> Any:
    return kind(model, dense_optimizer(model), "cpu", **options)


def raised(function: Any, *args: Any) -> str:
    """What a call raises, as text."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", PIPELINES)
def test_pipeline_equals_the_plain_loop_bit_for_bit(kind, world_size):
    def train(model, env):
        loader = batches(5, env.rank, world_size)
        outputs = run_out(piped(model, kind), loader)
        return outputs, model.state_dict()

    def train_plain(model, env):
        return train_plainly(model, batches(5, env.rank, world_size)), model.state_dict()

    for actual, expected in zip(on_ranks(train, world_size), on_ranks(train_plain, world_size), strict=True):
        assert len(actual[0]) == 5
        assert all(torch.equal(*pair) for pair in zip(actual[0], expected[0], strict=True))
        assert_same(actual[1], expected[1])


def test_next_ids_are_sent_before_the_backward_pass_and_all_before_any_is_waited_for():
    def train(model, env):
        watched = Watched(env.communicator)
        pipeline, loader = piped(model), batches(4, env.rank, 2)
        for _ in range(2):
            pipeline.progress(loader)
        watched.clear()
        pipeline.progress(loader)
        return watched.events

    for events in on_ranks(train, 2, local_world_size=1):
        starts = [label for event, label in events if event == "start"]
        first_gradient = next(i for i, label in enumerate(starts) if "gradients" in label)
        assert starts[:first_gradient].count("ids") == 2  # of both collections
        assert "ids" not in starts[first_gradient:]
        headers = [event for event in events if event[1] == "headers"]
        assert headers == [("start", "headers")] * 2 + [("wait", "headers")] * 2
        waits_for_ids = [i for i, event in enumerate(events) if event == ("wait", "ids")]
        assert max(waits_for_ids) < events.index(("start", "ids"))  # those of this batch, sent a step before


def test_step_takes_the_collectives_of_the_plain_loop():
    def count(model, env, loop):
        loader = batches(6, env.rank, 2)
        step = loop(model, loader)
        for _ in range(2):
            step()
        before = len(env.communicator.labels)
        step()
        return len(env.communicator.labels) - before

    def pipeline_step(model, loader):
        pipeline = piped(model)
        return lambda: pipeline.progress(loader)

    def plain_step(model, loader):
        return lambda: train_plainly(model, iter([next(loader)]))

    counts = [
        on_ranks(lambda model, env, loop=loop: count(model, env, loop), 2)
        for loop in (pipeline_step, plain_step)
    ]
    assert counts[0] == counts[1]


def test_learning_rates_hold_for_the_step_they_are_set_before():
    def train(model, env, step):
        for rate, _ in zip((0.5, 0.0, 2.0, 0.1), range(4), strict=True):
            for group in model.fused_optimizer.param_groups:
                group["lr"] = rate
            step()
        return model.state_dict()

    def with_pipeline(model, env):
        pipeline, loader = piped(model), batches(4, env.rank, 2)
        return train(model, env, lambda: pipeline.progress(loader))

    def plainly(model, env):
        loader = batches(4, env.rank, 2)
        return train(model, env, lambda: train_plainly(model, iter([next(loader)])))

    for actual, expected in zip(on_ranks(with_pipeline, 2), on_ranks(plainly, 2), strict=True):
        assert_same(actual, expected)


# The end of data


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("counts", [(3, 5), (5, 1), (0, 2), (2, 0), (0, 0), (4, 4), (1, 3, 0)])
def test_first_rank_without_data_ends_the_loop_for_all(kind, counts):
    world_size, shortest = len(counts), min(counts)

    def train(model, env):
        pipeline, loader = piped(model, kind), batches(counts[env.rank], env.rank, world_size)
        outputs = run_out(pipeline, loader)
        with pytest.raises(StopIteration):
            pipeline.progress(iter(()))
        return len(outputs), model.state_dict()

    def train_plain(model, env):
        train_plainly(model, batches(shortest, env.rank, world_size))
        return model.state_dict()

    results = on_ranks(train, world_size)
    assert [count for count, _ in results] == [shortest] * world_size
    for (_, actual), expected in zip(results, on_ranks(train_plain, world_size), strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("counts", [(3, 5), (4, 1), (0, 2), (2, 0), (0, 0), (1, 3, 0)])
def test_last_rank_with_data_ends_the_loop_and_the_others_go_on_with_empty_batches(kind, counts):
    world_size, longest = len(counts), max(counts)

    def train(model, env):
        loader = batches(counts[env.rank], env.rank, world_size)
        outputs = run_out(piped(model, kind, end_of_data="last_rank"), loader)
        return [len(output) for output in outputs], model.state_dict()

    def train_plain(model, env):
        own = list(batches(counts[env.rank], env.rank, world_size))
        own += [examples(step, env.rank, world_size, size=0) for step in range(len(own), longest)]
        train_plainly(model, iter(own))
        return model.state_dict()

    results = on_ranks(train, world_size)
    for rank, (sizes, _) in enumerate(results):
        own = [len(batch.dense) for batch in batches(counts[rank], rank, world_size)]
        assert sizes == own + [0] * (longest - counts[rank])
    for (_, actual), expected in zip(results, on_ranks(train_plain, world_size), strict=True):
        assert_same(actual, expected)


def test_empty_batch_of_the_users_is_used():
    def train(model, env):
        made = []

        def empty_batch():
            made.append(examples(0, env.rank, 2, size=0))
            return made[-1]

        pipeline = piped(model, end_of_data="last_rank", empty_batch=empty_batch)
        outputs = run_out(pipeline, batches(1 + env.rank, env.rank, 2))
        return len(outputs), len(made)

    assert on_ranks(train, 2) == [(2, 2), (2, 1)]  # the last is that of the end


def test_rank_without_data_raises_on_all_where_no_empty_batch_can_be_made():
    def train(model, env, kind):
        loader = list(batches(2 * env.rank, env.rank, 2))
        for batch in loader:
            batch.name = lambda: "does not travel"
        pipeline = piped(model, kind, end_of_data="last_rank")
        iterator = iter(loader)
        return [raised(pipeline.progress, iterator) for _ in range(2)]

    for kind in PIPELINES:
        first, second = on_ranks(lambda model, env, kind=kind: train(model, env, kind), 2)
        assert [text.split(",")[0] for text in first] == ["InvalidInputError: this rank's data has ended"] * 2
        assert all(text.startswith("DistributedError: rank 0") for text in second)


def test_second_epoch_goes_on_with_another_iterator():
    def train(model, env):
        pipeline = piped(model)
        counts = [len(run_out(pipeline, batches(count, env.rank, 2))) for count in (2 + env.rank, 3)]
        return counts, len(env.communicator.labels)

    (first, labels), (second, others) = on_ranks(train, 2)
    assert first == second == [2, 3]
    assert labels == others


def test_ranks_that_choose_differently_raise_on_all():
    def train(model, env):
        pipeline = piped(model, end_of_data=("first_rank", "last_rank")[env.rank])
        return raised(pipeline.progress, batches(2, env.rank, 2))

    texts = on_ranks(train, 2)
    assert set(texts) == {
        "InvalidInputError: end_of_data differs between ranks: first_rank, last_rank (rank 0 first); give all ranks "
        "the same"
    }


def test_unknown_end_of_data_raises_with_the_nearest():
    with pytest.raises(
        InvalidInputError, match=r"is 'last_rnk'; .* first_rank, last_rank\. Did you mean 'last_rank'"
    ):
        on_ranks(lambda model, env: piped(model, end_of_data="last_rnk"), 1)


# What fails


def bad(step: int, rank: int, world_size: int) -> Any:
    batch = examples(step, rank, world_size, size=2)
    batch.sparse["bags"].values()[:] = 99
    return batch


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("bad_step", [0, 1, 3])
def test_wrong_batch_on_one_rank_raises_on_all_in_its_step_and_the_next_trains(kind, bad_step):
    def loader_of(env):
        for step in range(5):
            is_bad = env.rank == 1 and step == bad_step
            yield bad(step, 1, 2) if is_bad else examples(step, env.rank, 2)

    def train(model, env):
        pipeline, loader = piped(model, kind), loader_of(env)
        texts = [raised(pipeline.progress, loader) for _ in range(5)]
        return texts, raised(pipeline.progress, loader), model.state_dict()

    def plainly(model, env):
        good = [examples(step, env.rank, 2) for step in range(5) if step != bad_step]
        train_plainly(model, iter(good))
        return model.state_dict()

    results = on_ranks(train, 2)
    assert results[0][0] == results[1][0]
    texts, end, _ = results[0]
    assert "rank 1: " in texts.pop(bad_step)
    assert texts == ["nothing was raised"] * 4
    assert end.startswith("StopIteration")
    for (_, _, actual), expected in zip(results, on_ranks(plainly, 2), strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("end_of_data", ["first_rank", "last_rank"])
@pytest.mark.parametrize("collection", ["bags", "rows"])
def test_wrong_batch_in_the_step_where_another_ranks_data_ends_raises_on_all(collection, end_of_data):
    def loader_of(env):
        yield from (examples(step, env.rank, 3) for step in range(2))
        if env.rank == 1:
            batch = examples(2, 1, 3, size=2)
            batch.sparse[collection].values()[:] = 99
            yield batch
        if env.rank == 2:
            yield examples(2, 2, 3)

    def train(model, env):
        pipeline, loader = piped(model, end_of_data=end_of_data), loader_of(env)
        return [raised(pipeline.progress, loader) for _ in range(4)], model.state_dict()

    def plainly(model, env):
        train_plainly(model, batches(2, env.rank, 3))
        return model.state_dict()

    results = on_ranks(train, 3)
    assert results[0][0] == results[1][0] == results[2][0]
    *before, told, end = results[0][0]
    assert before == ["nothing was raised"] * 2
    assert told.startswith("InvalidInputError: rank 1: feature ")
    assert "has the id 99" in told
    assert end.startswith("StopIteration")
    for (_, actual), expected in zip(results, on_ranks(plainly, 3), strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("kind", PIPELINES)
def test_iterator_that_raises_in_the_step_where_another_ranks_data_ends_raises_on_all(kind):
    def loader_of(env):
        yield examples(0, env.rank, 2)
        if env.rank == 1:
            raise OSError("the disk is gone")

    def train(model, env):
        pipeline, loader = piped(model, kind), loader_of(env)
        return [raised(pipeline.progress, loader) for _ in range(3)]

    first, second = on_ranks(train, 2)
    assert first[0] == second[0] == "nothing was raised"
    assert first[1].startswith("DistributedError: rank 1")
    assert second[1] == "OSError: the disk is gone"
    assert first[2].startswith("StopIteration")
    assert second[2].startswith("StopIteration")


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("bad_step", [0, 1, 2])
def test_iterator_that_raises_on_one_rank_raises_on_all_in_that_step_and_the_next_trains(kind, bad_step):
    class Loader:
        def __init__(self, rank):
            self.step, self.rank = -1, rank

        def __next__(self):
            self.step += 1
            if self.rank == 1 and self.step == bad_step:
                raise OSError("the disk is gone")
            return examples(self.step, self.rank, 2)

    def train(model, env):
        pipeline, loader = piped(model, kind), Loader(env.rank)
        return [raised(pipeline.progress, loader) for _ in range(4)]

    first, second = on_ranks(train, 2)
    assert second.pop(bad_step) == "OSError: the disk is gone"
    assert first.pop(bad_step).startswith("DistributedError: rank 1")
    assert first == second == ["nothing was raised"] * 3


class Fails(nn.Module):
    """A model that raises on one rank in one step, before, between or after its collections' forward passes."""

    def __init__(self, towers: Any, where: str) -> None:
        super().__init__()
        self.bags, self.sequences, self.over = towers.bags, towers.sequences, towers.over
        self.where, self.when = where, ""

    def _maybe(self, batch: Any, where: str) -> None:
        if (where, batch.name) == (self.where, self.when):
            raise ArithmeticError(f"in {batch.name}")

    def forward(self, batch: Any) -> Any:
        self._maybe(batch, "before")
        pooled = self.bags(batch.sparse["bags"])
        self._maybe(batch, "between")
        rows = self.sequences(batch.sparse["rows"])["s"].values()
        output = self.over(torch.cat([pooled.values(), batch.dense], 1))
        self._maybe(batch, "after")
        return output.square().mean(1) + rows.square().sum() / 8, output.detach()


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("bad_step", [0, 1, 3])
def test_model_that_raises_on_one_rank_raises_on_all_in_that_step_and_no_batch_is_lost(kind, where, bad_step):
    def train(model, env):
        model.module.when = f"{bad_step} of 1"
        pipeline, loader = piped(model, kind), batches(5, env.rank, 2)
        texts = [raised(pipeline.progress, loader) for _ in range(5)]
        return texts, raised(pipeline.progress, loader), model.state_dict()

    def plainly(model, env):
        good = [examples(step, env.rank, 2) for step in range(5) if step != bad_step]
        train_plainly(model, iter(good))
        return model.state_dict()

    results = on_ranks(train, 2, Fails(towers(2), where))
    assert results[1][0].pop(bad_step) == f"ArithmeticError: in {bad_step} of 1"
    assert results[0][0].pop(bad_step).startswith("DistributedError: rank 1 failed in the forward pass")
    for (texts, end, actual), expected in zip(results, on_ranks(plainly, 2), strict=True):
        assert texts == ["nothing was raised"] * 4
        assert end.startswith("StopIteration")
        assert_same(actual, expected)


def test_model_that_raises_on_all_ranks_raises_its_own_error_on_each():
    class Always(Fails):
        def _maybe(self, batch, where):
            if where == "after" and batch.name.startswith("1 "):
                raise ArithmeticError(batch.name)

    def train(model, env):
        pipeline, loader = piped(model), batches(3, env.rank, 2)
        return [raised(pipeline.progress, loader) for _ in range(3)]

    fine = "nothing was raised"
    assert on_ranks(train, 2, Always(towers(2), "")) == [
        [fine, f"ArithmeticError: 1 of {rank}", fine] for rank in range(2)
    ]


def test_update_that_raises_closes_the_pipeline_until_it_is_reset():
    def train(model, env):
        pipeline, loader = piped(model), batches(6, env.rank, 2)
        pipeline.progress(loader)
        step, pipeline._optimizer.step = pipeline._optimizer.step, lambda: 1 / 0
        texts = [raised(pipeline.progress, loader) for _ in range(2)]
        pipeline._optimizer.step = step
        pipeline.reset()
        return [*texts, raised(pipeline.progress, loader), len(run_out(pipeline, loader))]

    for texts in on_ranks(train, 2):
        assert texts[0] == "ZeroDivisionError: division by zero"
        assert texts[1].startswith(
            "DistributedError: this pipeline was closed by ZeroDivisionError in the update"
        )
        assert texts[2:] == ["nothing was raised", 2]  # the third batch was under way


def test_model_that_returns_no_pair_raises_on_all_with_what_it_returned():
    def train(model, env):
        pipeline = piped(model, custom_model_fwd=lambda batch: model(batch)[0])
        return raised(pipeline.progress, batches(2, env.rank, 2))

    for text in on_ranks(train, 2):
        assert text.startswith(
            "InvalidInputError: the model returned a Tensor; a pipeline wants (losses, output)"
        )


# Where inputs stand


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
        return env.communicator.labels, sharded.state_dict()

    return run_simulated(train, 2, timeout_s=20.0)


@pytest.mark.parametrize("form", FORMS)
def test_input_is_found_in_batches_of_any_form(form):
    results, plain = train_form(FORMS[form], TrainPipelineSparseDist), train_form(FORMS[form], None)
    for (labels, actual), (_, expected) in zip(results, plain, strict=True):
        assert_same(actual, expected)
        assert labels.count("status") == 1  # before the first batch, and never again
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
            texts.append(raised(pipeline.progress, loader))
        return texts

    first, second = run_simulated(train, 2, timeout_s=20.0)
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
        return [raised(pipeline.progress, loader) for _ in range(4)]

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
        return [raised(pipeline.progress, loader) for _ in range(3)]

    first, second = run_simulated(train, 2)
    assert (
        "had the input of a collection at batch['x'], where this batch has none (KeyError: 'x')"
        in second.pop(1)
    )
    assert "rank 1" in first.pop(1)
    assert first == second == ["nothing was raised"] * 2


@pytest.mark.parametrize("kind", PIPELINES)
def test_same_batch_again_and_again_trains_as_in_the_plain_loop(kind):
    def train(model, env):
        batch = examples(0, env.rank, 2)
        run_out(piped(model, kind), iter([batch] * 3))
        return model.state_dict()

    def plainly(model, env):
        train_plainly(model, iter([examples(0, env.rank, 2)] * 3))
        return model.state_dict()

    for actual, expected in zip(on_ranks(train, 2), on_ranks(plainly, 2), strict=True):
        assert_same(actual, expected)


def test_evaluation_between_steps_leaves_them_alone():
    def train(model, env, *, evaluates):
        pipeline, loader = piped(model), batches(4, env.rank, 2)
        for step in range(4):
            pipeline.progress(loader)
            if evaluates:
                with torch.no_grad():
                    model(examples(90 + step, env.rank, 2))
        return model.state_dict()

    for actual, expected in zip(
        on_ranks(lambda model, env: train(model, env, evaluates=True), 2),
        on_ranks(lambda model, env: train(model, env, evaluates=False), 2),
        strict=True,
    ):
        assert_same(actual, expected)


def test_batch_under_way_that_one_rank_evaluates_is_exchanged_again_for_it():
    def train(model, env, *, evaluates):
        own = list(batches(4, env.rank, 2))
        pipeline, loader = piped(model), iter(own)
        for step in range(4):
            pipeline.progress(loader)
            if evaluates:
                with torch.no_grad():  # on rank 0 the next batch, whose ids are under way, on rank 1 another
                    model(own[min(step + 1, 3)] if env.rank == 0 else examples(90, 1, 2))
        return model.state_dict()

    for actual, expected in zip(
        on_ranks(lambda model, env: train(model, env, evaluates=True), 2),
        on_ranks(lambda model, env: train(model, env, evaluates=False), 2),
        strict=True,
    ):
        assert_same(actual, expected)


def test_two_pipelines_of_one_model_take_turns():
    def train(model, env, loop):
        training, others = batches(5, env.rank, 2), batches(5, env.rank, 2, start=50)
        return loop(model, training, others), model.state_dict()

    def pipelines(model, training, others):
        first, second = piped(model), piped(model, end_of_data="last_rank")
        outputs = []
        for _ in range(5):
            model.train()
            outputs.append(first.progress(training))
            model.eval()
            outputs.append(second.progress(others))
        return outputs

    def plainly(model, training, others):
        outputs = []
        for batch, other in zip(training, others, strict=True):
            outputs += train_plainly(model, iter([batch]))
            outputs.append(model(other)[1])
        return outputs

    for actual, expected in zip(
        on_ranks(lambda model, env: train(model, env, pipelines), 2),
        on_ranks(lambda model, env: train(model, env, plainly), 2),
        strict=True,
    ):
        assert all(torch.equal(*pair) for pair in zip(actual[0], expected[0], strict=True))
        assert_same(actual[1], expected[1])


def test_evaluation_mode_gives_outputs_and_updates_nothing():
    def evaluate(model, env):
        before = model.state_dict()
        model.eval()
        with torch.no_grad():
            outputs = run_out(piped(model), batches(3, env.rank, 2))
            expected = [model(batch)[1] for batch in batches(3, env.rank, 2)]
        assert_same(model.state_dict(), before)
        return all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))

    assert on_ranks(evaluate, 2) == [True, True]


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
        return model.state_dict()

    results = run_simulated(lambda env: train(env, TrainPipelineSparseDist), 2)
    for actual, expected in zip(results, run_simulated(lambda env: train(env, None), 2), strict=True):
        assert_same(actual, expected)


def test_model_without_collections_ends_in_step():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.over = nn.Linear(2, 1)

        def forward(self, batch):
            return self.over(batch), batch

    def train(env):
        model = DistributedModelParallel(Dense(), env=env, device="cpu", plan=ShardingPlan({}))
        return len(run_out(piped(model), iter([torch.ones(3, 2)] * (2 + env.rank))))

    assert run_simulated(train, 2) == [2, 2]
