"""Pipelines of stages on simulated ranks: replaced, wrapped and added ones, and stages that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.core.runtime.plans import LoopLookup
from tests.errors import error_of
from tests.plugins.pipeline.pipelines import (
    assert_same,
    assert_trains_as_the_plain_loop,
    batches,
    dense_optimizer,
    on_ranks,
    run_out,
)

import shardwright as sw

STEPS = 4


class Calls(sw.PipelineStage):
    """A stage that calls a function."""

    def __init__(self, name: str, phase: str, function: Any) -> None:
        self.name, self.phase, self.function = name, phase, function

    def run(self, step: sw.PipelineStep) -> None:
        self.function(step)


class Noted(sw.StageAround):
    """A stage whose runs are noted."""

    def __init__(self, inner: sw.PipelineStage, notes: list[tuple[int, str]]) -> None:
        super().__init__(inner)
        self.notes = notes

    def run(self, step: sw.PipelineStep) -> None:
        self.notes.append((step.number, self.name))
        self.inner.run(step)


def piped(model: Any, stages: Any) -> Any:
    return sw.TrainPipeline(model, dense_optimizer(model), "cpu", stages=stages)


def own(rank: int) -> Any:
    return batches(STEPS, rank, 2)


@pytest.mark.parametrize(
    "kind", [sw.TrainPipelineBase, sw.TrainPipelineSparseDist, sw.PrefetchTrainPipelineSparseDist]
)
def test_wrapped_stages_of_every_pipeline_run_in_order_and_train_as_the_plain_loop(kind):
    def train(model, env):
        notes: list[tuple[int, str]] = []
        stages = kind.stages()
        assert len(run_out(piped(model, [Noted(stage, notes) for stage in stages]), own(env.rank))) == STEPS
        for number in range(STEPS):
            assert [name for other, name in notes if other == number] == [stage.name for stage in stages]
        is_ahead = any(stage.phase == "exchange" for stage in stages)
        # The next batch is copied in the forward pass, after lookups, or right after it.
        assert notes.index((2, "copy to device")) < notes.index((1, "backward"))
        assert not is_ahead or notes.index((2, "exchange ids")) < notes.index((1, "backward"))

    assert_trains_as_the_plain_loop(train, own)


def test_stage_that_transforms_batches_sees_each_once_and_what_it_keeps_reaches_later_stages():
    def double(step):
        step.batch.dense = step.batch.dense * 2
        step.extras["seen"] = step.batch.name

    def train(model, env):
        stages = sw.TrainPipelineSparseDist.stages()
        stages.insert(1, Calls("double", "input", double))
        seen: list[str] = []
        stages.append(Calls("log", "update", lambda step: seen.append(step.extras["seen"])))
        run_out(piped(model, stages), own(env.rank))
        return seen

    def doubled(rank):
        for batch in own(rank):
            batch.dense = batch.dense * 2
            yield batch

    seen = assert_trains_as_the_plain_loop(train, doubled)
    assert seen == [[batch.name for batch in own(rank)] for rank in range(2)]


def test_form_of_empty_batches_is_that_which_the_iterator_gives():
    def tell(step):
        step.batch = step.batch["examples"]

    def train(model, env):
        stages = sw.TrainPipelineSparseDist.stages()
        stages.insert(0, Calls("open", "input", tell))
        loader = iter([{"examples": batch} for batch in batches(2 + env.rank, env.rank, 2)])
        pipeline = sw.TrainPipeline(
            model, dense_optimizer(model), "cpu", stages=stages, end_of_data="last_rank"
        )
        return len(run_out(pipeline, loader))

    assert on_ranks(train, 2) == [3, 3]


@pytest.mark.parametrize(
    ("place", "phase", "bad_step"),
    [
        (0, "input", 2),
        (1, "input", 0),
        (1, "input", 2),
        (1, "exchange", 2),
        (2, "exchange", 2),
        (3, "exchange", 0),
        (3, "exchange", 2),
        (4, "prefetch", 0),
        (4, "prefetch", 2),
        (4, "forward", 2),
        (6, "forward", 0),
        (6, "forward", 2),
    ],
)
def test_stage_that_fails_on_one_rank_fails_the_step_of_its_batch_on_all_and_the_next_trains(
    place, phase, bad_step
):
    def fail(step):
        if step.batch.name == f"{bad_step} of 1":
            raise ArithmeticError("a stage fails")

    def train(model, env):
        stages = sw.PrefetchTrainPipelineSparseDist.stages()
        stages.insert(place, Calls("failing", phase, fail))
        pipeline, loader = piped(model, stages), batches(5, env.rank, 2)
        return [error_of(pipeline.progress, loader) for _ in range(6)]

    def good(rank):
        return [batch for batch in batches(5, rank, 2) if batch.name[0] != str(bad_step)]

    for rank, texts in enumerate(assert_trains_as_the_plain_loop(train, good)):
        failed = texts.pop(bad_step)
        assert "a stage fails" in failed or (rank == 0 and "rank 1 failed in the forward pass" in failed)
        assert texts[:4] == ["nothing was raised"] * 4
        assert texts[4].startswith("StopIteration")


def test_stage_that_raises_stop_iteration_does_not_end_the_data():
    def fail(step):
        raise StopIteration

    def train(model, env):
        stages = [Calls("stops", "input", fail), *sw.TrainPipelineSparseDist.stages()]
        return error_of(piped(model, stages).progress, batches(3, env.rank, 2))

    for text in on_ranks(train, 2):
        assert "the stage 'stops' raised StopIteration" in text


# Loops of others, as stages


def test_backward_pass_outside_of_the_pipeline_trains_as_the_plain_loop():
    def hand_out(step):
        step.output = step.losses, step.output

    def train(model, env):
        stages = [stage for stage in sw.TrainPipelineSparseDist.stages() if stage.phase != "update"]
        pipeline = piped(model, [*stages, Calls("losses", "forward", hand_out)])
        optimizer, loader = dense_optimizer(model), own(env.rank)
        for _ in range(STEPS):
            losses, _ = pipeline.progress(loader)
            losses.sum().backward()
            optimizer.step()

    assert_trains_as_the_plain_loop(train, own)


def forward_backward(forward_step_func: Any, data_iterator: Any, model: Any) -> Any:
    """A schedule of one micro-batch, in the manner of those that make both passes."""
    losses, loss_func = forward_step_func(data_iterator, model)
    loss_func(losses).backward()
    return losses


class BothPasses(sw.PipelineStage):
    """Forward and backward pass by one function."""

    name, phase = "forward and backward", "forward"

    def run(self, step: sw.PipelineStep) -> None:
        def forward_step(iterator: Any, model: Any) -> Any:
            losses, step.output = model(next(iterator))
            step.agree()
            return losses, torch.sum

        step.losses = forward_backward(forward_step, iter([step.batch]), step.model)


def both_passes() -> list[sw.PipelineStage]:
    ahead = [stage for stage in sw.TrainPipelineSparseDist.stages() if stage.phase in ("input", "exchange")]
    return [*ahead, sw.ZeroGrad(), BothPasses(), sw.OptimizerStep()]


def test_forward_and_backward_pass_as_one_function_train_as_the_plain_loop():
    def train(model, env):
        run_out(piped(model, both_passes()), own(env.rank))

    assert_trains_as_the_plain_loop(train, own)


def test_forward_pass_that_fails_in_one_function_with_the_backward_pass_fails_on_all_and_the_next_trains():
    def train(model, env):
        def forward(module, args, result):
            if args[0].name == "1 of 1":
                raise ArithmeticError("in 1")

        model.register_forward_hook(forward)
        pipeline, loader = piped(model, both_passes()), batches(3, env.rank, 2)
        return [error_of(pipeline.progress, loader) for _ in range(3)]

    for rank, texts in enumerate(on_ranks(train, 2)):
        assert "rank 1 failed in the forward pass" in texts[1] if rank == 0 else "in 1" in texts[1]
        assert texts[::2] == ["nothing was raised"] * 2


def test_eval_pipeline_gives_outputs_of_batches_and_updates_nothing():
    def evaluate(model, env):
        before = model.full_state_dict()
        pipeline = sw.EvalPipelineSparseDist(model.eval(), dense_optimizer(model), "cpu")
        outputs = run_out(pipeline, batches(3, env.rank, 2))
        with torch.no_grad():
            expected = [model(batch)[1] for batch in batches(3, env.rank, 2)]
        assert_same(model.full_state_dict(), before)
        return all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))

    assert on_ranks(evaluate, 2) == [True, True]


def test_prefetch_has_kernels_see_the_bags_of_the_next_batch_before_the_backward_pass(monkeypatch):
    forward = LoopLookup.forward

    def prefetch(self, bags):
        self.near = bags.ids.clone()

    def noting(self, bags, *, training):
        if hasattr(self, "near"):
            self.was_near = [*getattr(self, "was_near", []), torch.equal(self.near, bags.ids)]
        return forward(self, bags, training=training)

    monkeypatch.setattr(LoopLookup, "prefetch", prefetch)
    monkeypatch.setattr(LoopLookup, "forward", noting)

    def train(model, env):
        notes: list[tuple[int, str]] = []
        stages = [Noted(stage, notes) for stage in sw.PrefetchTrainPipelineSparseDist.stages()]
        outputs = run_out(piped(model, stages), batches(STEPS, env.rank, 2))
        assert notes.index((2, "prefetch")) < notes.index((1, "backward"))
        for lookup in model.module.bags.engine.executors[0].lookups:  # those that ids are sent to
            assert lookup.was_near == [True] * (STEPS - 1)  # the first batch is exchanged in its forward pass
        return len(outputs)

    assert on_ranks(train, 2) == [STEPS, STEPS]


# Lists that are no pipeline


def test_lists_that_are_no_pipeline_are_refused_by_name():
    def refuse(model, env):
        listed = sw.TrainPipelineSparseDist.stages()
        return [
            error_of(piped, model, stages)
            for stages in (
                [*listed, sw.CopyToDevice()],
                [stage for stage in listed if stage.phase != "forward"],
                [*listed, "backward"],
                [Calls("mask", "inputs", print), *listed],
            )
        ]

    order, no_forward, no_stage, no_phase = on_ranks(refuse, 1)[0]
    assert "'copy to device' has the phase 'input', and stands behind one of the phase 'update'" in order
    assert "no stage has the phase 'forward'" in no_forward
    assert "stages[7] must be a PipelineStage" in no_stage
    assert "Did you mean 'input'?" in no_phase


def test_call_of_a_step_outside_its_phase_is_refused_by_name():
    def train(model, env):
        stages = [*sw.TrainPipelineBase.stages()]
        stages.insert(1, Calls("too early", "input", lambda step: step.exchange_ids()))
        return error_of(piped(model, stages).progress, batches(3, env.rank, 1))

    assert "exchange_ids() was called outside the phase 'exchange'" in on_ranks(train, 1)[0]
