"""Stages of pipelines: small objects that take a batch from its iterator to the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import Factory, define, field
from torch import Tensor, nn
from torch.profiler import record_function

from shardwright.errors import InvalidInputError, nearest
from shardwright.runtime.step.batches.batch_tree import moved

INPUT, EXCHANGE, PREFETCH, FORWARD, UPDATE = PHASES = ("input", "exchange", "prefetch", "forward", "update")


@define(eq=False)
class PipelineStep:
    """One batch inside a pipeline.

    Args:
        number: number of batches that this rank took before it, since the pipeline was made or reset.
        batch: the batch; a stage may put another in its place.
        device: device that batches are copied to; ``None`` if they stay.
        model: the sharded model.
        optimizer: the pipeline's optimizer.

    Attributes:
        losses: tensor whose sum goes backward; from the forward pass.
        output: result of :meth:`TrainPipeline.progress`; from the forward pass.
        extras: values that stages keep for stages after them, by names of their own.
    """

    number: int
    batch: Any
    device: torch.device | None
    model: nn.Module
    optimizer: Any = None
    losses: Any = None
    output: Any = None
    extras: dict[str, Any] = Factory(dict)
    _calls: Mapping[str, Callable[[], None]] = field(factory=dict, init=False)

    def exchange_headers(self) -> None:
        """Start the headers of the batch's ids, in the phase ``"exchange"``; every rank makes this call."""
        self._call("exchange_headers", EXCHANGE)

    def exchange_ids(self) -> None:
        """Wait for all ranks' headers and start the ids, in the phase ``"exchange"``; every rank makes this call.

        A wrong batch of any rank is not raised here. All ranks raise it when the step begins.
        """
        self._call("exchange_ids", EXCHANGE)

    def prefetch(self) -> None:
        """Wait for the ids and have kernels bring their rows near, in the phase ``"prefetch"``, if some can."""
        self._call("prefetch", PREFETCH)

    def agree(self) -> None:
        """Find out if the forward pass was made on all ranks; every rank makes this call, once in a step.

        A stage of the phase ``"forward"`` that makes a backward pass as well calls this between the two. The pipeline
        makes the call after that phase if no stage did.

        Raises:
            DistributedError: it failed on a rank; raised on all ranks, and nothing was updated.
        """
        self._call("agree", FORWARD)

    def _call(self, name: str, phase: str) -> None:
        if name not in self._calls:
            raise InvalidInputError(
                f"PipelineStep.{name}() was called outside the phase {phase!r}: call it in run() of a stage whose "
                f"phase is {phase!r}"
            )
        self._calls[name]()

    @contextmanager
    def during(self, **calls: Callable[[], None]) -> Iterator[None]:
        """A context in which stages may make some of the calls above, by name; for the pipeline."""
        self._calls = calls
        try:
            yield
        finally:
            self._calls = {}


class PipelineStage(ABC):
    """One stage of a pipeline; a subclass sets its name and phase, and writes :meth:`run`.

    A batch goes through the stages in the order of the list. The phase says when that is:

    - ``"input"``: while the batch before it computes, once that one's results are being sent;
    - ``"exchange"``: thereafter, to begin the exchange of its ids;
    - ``"prefetch"``: after the forward pass of the batch before it, before that one's backward pass;
    - ``"forward"``: in its own step;
    - ``"update"``: thereafter, in training only.

    A stage that raises on one rank, in any phase but the last, fails the step of its batch on all ranks, and the next
    batch trains. In ``"update"`` it closes the pipeline on its rank, since the update is half made.

    Attributes:
        name: name in profiles (``## name ##``) and errors.
        phase: its phase.

    Example:
        >>> import shardwright as sw
        >>> class Mask(sw.PipelineStage):
        ...     name, phase = "mask", "input"
        ...     def run(self, step):
        ...         step.batch["dense"] = step.batch["dense"] * (step.batch["dense"] > 0)
        >>> stages = sw.TrainPipelineSparseDist.stages()
        >>> stages.insert(1, Mask())
        >>> [stage.name for stage in stages][:4]
        ['copy to device', 'mask', 'exchange headers', 'exchange ids']
    """

    name: str
    phase: str

    @abstractmethod
    def run(self, step: PipelineStep) -> None:
        """Take a batch through this stage.

        Args:
            step: the batch, and what the stages before made of it.
        """


class StageAround(PipelineStage):
    """A stage around another, in its place and phase; a subclass writes :meth:`run` and runs ``self.inner`` in it.

    Args:
        inner: stage that it wraps.

    Example:
        >>> import time, shardwright as sw
        >>> class Timed(sw.StageAround):
        ...     def run(self, step):
        ...         start = time.perf_counter()
        ...         self.inner.run(step)
        ...         step.extras[self.name + ", s"] = time.perf_counter() - start
        >>> stages = [Timed(stage) for stage in sw.TrainPipelineSparseDist.stages()]
    """

    def __init__(self, inner: PipelineStage) -> None:
        self.inner, self.name, self.phase = inner, inner.name, inner.phase


class CopyToDevice(PipelineStage):
    """A copy of the batch to the pipeline's device, on a stream beside the main one."""

    name, phase = "copy to device", INPUT

    def run(self, step: PipelineStep) -> None:
        """Copy the batch."""
        if step.device is not None:
            step.batch = moved(step.batch, step.device)


class ExchangeHeaders(PipelineStage):
    """The start of the exchange of ids: headers tell all ranks how many there are, and if a batch is wrong."""

    name, phase = "exchange headers", EXCHANGE

    def run(self, step: PipelineStep) -> None:
        """Start the headers."""
        step.exchange_headers()


class ExchangeIds(PipelineStage):
    """The exchange of ids, which travel while the batch before computes."""

    name, phase = "exchange ids", EXCHANGE

    def run(self, step: PipelineStep) -> None:
        """Wait for headers and start the ids."""
        step.exchange_ids()


class Prefetch(PipelineStage):
    """The bringing near of rows that the arrived ids ask for; nothing unless a compute kernel's lookup prefetches."""

    name, phase = "prefetch", PREFETCH

    def run(self, step: PipelineStep) -> None:
        """Have kernels bring rows near."""
        step.prefetch()


class ZeroGrad(PipelineStage):
    """The dropping of gradients before a forward pass that trains."""

    name, phase = "zero grad", FORWARD

    def run(self, step: PipelineStep) -> None:
        """Drop gradients, in training mode."""
        if step.model.training:
            step.optimizer.zero_grad()


class Forward(PipelineStage):
    """The forward pass, which gives losses and output.

    Args:
        function: function called with the batch instead of the model; it returns ``(losses, output)``.
    """

    name, phase = "forward", FORWARD

    def __init__(self, function: Callable[[Any], Any] | None = None) -> None:
        self._function = function

    def run(self, step: PipelineStep) -> None:
        """Make the forward pass.

        Raises:
            InvalidInputError: the model returned something else than two values.
        """
        function = self._function or step.model
        step.losses, step.output = _pair(function(step.batch))


class Evaluate(PipelineStage):
    """The forward pass without gradients; the model stays in the mode that it is in.

    Args:
        function: function called with the batch instead of the model, as in :class:`Forward`.
    """

    name, phase = "forward", FORWARD

    def __init__(self, function: Callable[[Any], Any] | None = None) -> None:
        self._forward = Forward(function)

    def run(self, step: PipelineStep) -> None:
        """Make the forward pass."""
        with torch.no_grad():
            self._forward.run(step)


class Backward(PipelineStage):
    """The backward pass of the losses' sum, which updates tables that are updated in it."""

    name, phase = "backward", UPDATE

    def run(self, step: PipelineStep) -> None:
        """Make the backward pass."""
        step.losses.sum().backward()


class OptimizerStep(PipelineStage):
    """The optimizer's step."""

    name, phase = "optimizer", UPDATE

    def run(self, step: PipelineStep) -> None:
        """Make the step."""
        step.optimizer.step()


def _pair(result: Any) -> tuple[Tensor, Any]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise InvalidInputError(
            f"the model returned a {type(result).__name__}; a pipeline wants (losses, output): wrap the model, or "
            "give custom_model_fwd"
        )
    losses, output = result
    return losses, output


class Stages(tuple[PipelineStage, ...]):
    """The stages of a pipeline, checked.

    Raises:
        InvalidInputError: one is not a stage or has no such phase, phases are out of order, or none is ``"forward"``.
    """

    def __new__(cls, stages: Sequence[PipelineStage]) -> Stages:
        """Check stages, and make them a list that does not change."""
        before = 0
        for stage in stages:
            place = _place_of(stage)
            if place < before:
                raise InvalidInputError(
                    f"the stage {stage.name!r} has the phase {stage.phase!r}, and stands behind one of the phase "
                    f"{PHASES[before]!r}: the order is {', '.join(PHASES)}"
                )
            before = place
        made = super().__new__(cls, stages)
        if not made.of(FORWARD):
            raise InvalidInputError(
                f"no stage has the phase {FORWARD!r}, which makes the forward pass: add shardwright.Forward()"
            )
        return made

    def of(self, phase: str) -> list[PipelineStage]:
        """Select the stages of a phase, in order."""
        return [stage for stage in self if stage.phase == phase]


def _place_of(stage: PipelineStage) -> int:
    """Place of a stage's phase in their order."""
    phase = getattr(stage, "phase", None)
    if phase not in PHASES or not isinstance(getattr(stage, "name", None), str):
        raise InvalidInputError(
            f"the stage {type(stage).__name__} has the phase {phase!r} and the name "
            f"{getattr(stage, 'name', None)!r}; it wants a name, and one of the phases {', '.join(PHASES)}."
            f"{nearest(str(phase), list(PHASES))}"
        )
    return PHASES.index(phase)


def run_stage(stage: PipelineStage, step: PipelineStep) -> None:
    """Take a step through a stage, under the stage's name in profiles.

    Raises:
        RuntimeError: the stage raised ``StopIteration``, which would look like the end of the data.
    """
    with record_function(f"## {stage.name} ##"):
        try:
            stage.run(step)
        except StopIteration as error:
            raise RuntimeError(f"the stage {stage.name!r} raised StopIteration") from error
