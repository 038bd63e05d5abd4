"""Pipelines: the ids of the next batch travel while this one computes.

A pipeline is a list of stages (see :mod:`shardwright_plugins.pipeline.stages`). Every rank makes a step of
:class:`TrainPipelineSparseDist` in this order:

1. lookups, whose ids are there already;
2. while their results travel, the next batch is read and copied, and its ids are sent;
3. the rest of the forward pass, and a status word that tells whether it failed;
4. backward pass and update, while ids travel.

The model is not traced. The places of the collections' inputs in a batch are observed in the first step, which is made
as without a pipeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from shardwright.arguments import checked
from shardwright.errors import DistributedError
from shardwright_plugins.pipeline.batch_settings import BatchSettings, EndOfData
from shardwright_plugins.pipeline.batches import BatchesInStep
from shardwright_plugins.pipeline.stages import (
    FORWARD,
    UPDATE,
    Backward,
    CopyToDevice,
    Evaluate,
    ExchangeHeaders,
    ExchangeIds,
    Forward,
    OptimizerStep,
    PipelineStage,
    PipelineStep,
    Prefetch,
    Stages,
    ZeroGrad,
    run_stage,
)

In = TypeVar("In")
Out = TypeVar("Out")


class StagedPipeline(ABC, Generic[In, Out]):
    """A loop over batches that takes each through a list of stages, one batch a call.

    A failure on one rank is raised on all ranks, and nothing hangs. A wrong batch, an iterator that raises or a stage
    ahead of the forward pass fails the step of that batch; the next ones train. A forward pass that raises fails its
    step; the next one trains. An error in the backward pass or the optimizer closes the pipeline on its rank. The
    update is then half made, and other ranks wait for the rest until the process ends or their time-out.

    Args:
        model: the sharded model, usually a ``DistributedModelParallel``.
        optimizer: optimizer of the dense parameters, or a ``CombinedOptimizer`` of all.
        device: device that batches are copied to.
        stages: stages that each batch goes through, in order; alike on all ranks.
        end_of_data: ``"first_rank"``: all ranks end with the first whose data ends; ``"last_rank"``: with the last,
            and a rank whose data has ended goes on with empty batches (its gradients are zero, and averages are over
            all ranks as before). The same on all ranks.
        empty_batch: function that makes a batch without examples, as the iterator would; by default a batch of the form
            of the first batch of any rank.

    Raises:
        InvalidInputError: there is no such ``end_of_data``, or stages are out of order.
    """

    @abstractmethod
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Any,
        device: torch.device | str,
        stages: Sequence[PipelineStage],
        *,
        end_of_data: EndOfData,
        empty_batch: Callable[[], In] | None,
    ) -> None:
        self._model, self._optimizer, self._stages = model, optimizer, Stages(stages)
        self._closed_by: BaseException | None = None
        self._batches = BatchesInStep(
            model,
            BatchSettings(
                device=torch.device(device),
                end_of_data=end_of_data,
                empty_batch=empty_batch,
                stages=self._stages,
                is_strict=True,
                optimizer=optimizer,
            ),
        )

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Make the next step; every rank makes this call. Profiles name its stages: ``## backward ##``, ...

        Args:
            dataloader_iter: this rank's batches. One batch ahead of the step is read.

        Returns:
            The model's output for the batch.

        Raises:
            StopIteration: the data has ended, on all ranks in the same step. A further call, with another iterator,
                starts again.
            InvalidInputError: a rank's batch is wrong; the text is the same on every rank.
            DistributedError: another rank failed, or this pipeline is closed.
        """
        if self._closed_by is not None:
            raise DistributedError(
                f"this pipeline was closed by {type(self._closed_by).__name__} in the update of a step: load a "
                "checkpoint and call reset() on all ranks"
            ) from self._closed_by
        step = self._batches.take(dataloader_iter)
        is_training = self._model.training
        errors: list[
            type[BaseException] | None
        ] = []  # of the forward pass, which all ranks made if it is ``None``
        try:
            with ExitStack() as forward_pass, step.during(agree=forward_pass.close):
                forward_pass.push(lambda kind, *_: errors.append(kind))
                forward_pass.enter_context(self._batches.forward(dataloader_iter))
                self._run(FORWARD, step)
            if is_training:
                self._run(UPDATE, step)
        except BaseException as error:
            if errors == [None] and is_training:
                self._closed_by = error
            raise
        output: Out = step.output
        return output

    def _run(self, phase: str, step: PipelineStep) -> None:
        for stage in self._stages.of(phase):
            run_stage(stage, step)

    def reset(self) -> None:
        """Drop the batches in progress and start again; every rank makes this call."""
        self._batches.reset()
        self._closed_by = None


def _trained(forward: Callable[[Any], Any] | None) -> list[PipelineStage]:
    """Stages of a step that trains."""
    return [ZeroGrad(), Forward(forward), Backward(), OptimizerStep()]


class TrainPipeline(StagedPipeline[In, Out]):
    """A pipeline of your own stages.

    It takes the list of another pipeline, with stages replaced, wrapped, added or left out. A list without stages of
    the phase ``"update"`` leaves the backward pass to you. All arguments are those of :class:`StagedPipeline`.

    Args:
        model: the sharded model.
        optimizer: optimizer that stages use.
        device: device that batches are copied to.
        stages: stages of a batch; those of :class:`TrainPipelineSparseDist` by default.
        end_of_data: ``"first_rank"`` or ``"last_rank"``.
        empty_batch: function that makes a batch without examples.

    Example:
        >>> import torch, shardwright as sw
        >>> class Losses(sw.PipelineStage):
        ...     name, phase = "losses", "forward"
        ...     def run(self, step):
        ...         step.output = step.losses
        >>> table = sw.EmbeddingBagConfig(1000, 8, name="user_id", feature_names=["user"])
        >>> model = sw.DistributedModelParallel(
        ...     sw.EmbeddingBagCollection([table], device="meta"), env=sw.ShardingEnv.local(device_type="cpu")
        ... )
        >>> stages = [stage for stage in sw.TrainPipelineSparseDist.stages() if stage.phase != "update"]
        >>> forward = sw.Forward(lambda batch: (model(batch).values().square().mean(), None))
        >>> stages = [forward if stage.name == "forward" else stage for stage in stages] + [Losses()]
        >>> pipeline = sw.TrainPipeline(model, model.fused_optimizer, torch.device("cpu"), stages=stages)
        >>> batches = iter([sw.KeyedJaggedTensor.from_lists({"user": [[7, 8], []]})])
        >>> pipeline.progress(batches).backward()  # the loop's own
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Any,
        device: torch.device | str,
        *,
        stages: Sequence[PipelineStage] | None = None,
        end_of_data: EndOfData = "first_rank",
        empty_batch: Callable[[], In] | None = None,
    ) -> None:
        stages = TrainPipelineSparseDist.stages() if stages is None else stages
        super().__init__(model, optimizer, device, stages, end_of_data=end_of_data, empty_batch=empty_batch)


class _ListedPipeline(StagedPipeline[In, Out]):
    """A pipeline with a list of stages of its own.

    The model is given a batch and returns ``(losses, output)``. In training mode the sum of ``losses`` goes backward
    and the optimizer makes a step; in evaluation mode neither. All arguments but the last are those of
    :class:`StagedPipeline`.

    Args:
        model: the sharded model.
        optimizer: optimizer of the dense parameters, or of all.
        device: device that batches are copied to.
        end_of_data: ``"first_rank"`` or ``"last_rank"``.
        empty_batch: function that makes a batch without examples.
        custom_model_fwd: function called instead of the model.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Any,
        device: torch.device | str,
        *,
        end_of_data: EndOfData = "first_rank",
        empty_batch: Callable[[], In] | None = None,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
    ) -> None:
        stages = self.stages(custom_model_fwd)
        super().__init__(model, optimizer, device, stages, end_of_data=end_of_data, empty_batch=empty_batch)

    @staticmethod
    @abstractmethod
    def stages(forward: Callable[[Any], Any] | None = None) -> list[PipelineStage]:
        """Make its stages, to be changed and given to :class:`TrainPipeline`.

        Args:
            forward: function called instead of the model.
        """


class TrainPipelineBase(_ListedPipeline[In, Out]):
    """A pipeline that copies the next batch to the device while this one computes.

    Ids are exchanged in the forward pass. It serves models whose collections get their inputs from changing places of
    the batch. Before each step the ranks exchange a status word.
    """

    @staticmethod
    def stages(forward: Callable[[Any], Any] | None = None) -> list[PipelineStage]:
        """Make its stages: a copy, and a step that trains."""
        return [CopyToDevice(), *_trained(forward)]


class TrainPipelineSparseDist(_ListedPipeline[In, Out]):
    """A pipeline that copies the next batch and exchanges its ids while this one computes.

    The inputs of the collections in the first forward pass are looked up in the batch. From then on the collections
    must be given the same places of every batch. A collection whose input the model makes itself exchanges its ids in
    the forward pass; a warning is logged.

    Example:
        >>> import torch, shardwright as sw
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         table = sw.EmbeddingBagConfig(1000, 8, name="user_id", feature_names=["user"])
        ...         self.bags = sw.EmbeddingBagCollection([table], device="meta")
        ...     def forward(self, batch):  # the losses, and the output
        ...         vectors = self.bags(batch).values()
        ...         return vectors.square().mean(), vectors
        >>> model = sw.DistributedModelParallel(Model(), env=sw.ShardingEnv.local(device_type="cpu"))
        >>> pipeline = sw.TrainPipelineSparseDist(model, model.fused_optimizer, torch.device("cpu"))
        >>> loader = [sw.KeyedJaggedTensor.from_lists({"user": [[7, 8], [], [user]]}) for user in range(3)]
        >>> batches, steps = iter(loader), 0
        >>> while True:
        ...     try:
        ...         output = pipeline.progress(batches)
        ...     except StopIteration:
        ...         break
        ...     steps += 1
        >>> steps, output.shape
        (3, torch.Size([3, 8]))
    """

    @staticmethod
    def stages(forward: Callable[[Any], Any] | None = None) -> list[PipelineStage]:
        """Make its stages: a copy, the exchange of ids, and a step that trains."""
        return [CopyToDevice(), ExchangeHeaders(), ExchangeIds(), *_trained(forward)]


class PrefetchTrainPipelineSparseDist(_ListedPipeline[In, Out]):
    """A :class:`TrainPipelineSparseDist` whose kernels bring the next batch's rows near during the backward pass.

    It serves compute kernels that have rows elsewhere than where they compute, and prefetch. With others it is the
    same as :class:`TrainPipelineSparseDist`.

    Example:
        >>> import shardwright as sw
        >>> [stage.name for stage in sw.PrefetchTrainPipelineSparseDist.stages()][:4]
        ['copy to device', 'exchange headers', 'exchange ids', 'prefetch']
    """

    @staticmethod
    def stages(forward: Callable[[Any], Any] | None = None) -> list[PipelineStage]:
        """Make its stages: a copy, the exchange of ids, the prefetch, and a step that trains."""
        return [CopyToDevice(), ExchangeHeaders(), ExchangeIds(), Prefetch(), *_trained(forward)]


class EvalPipelineSparseDist(_ListedPipeline[In, Out]):
    """A :class:`TrainPipelineSparseDist` that makes forward passes without gradients, and nothing else.

    Example:
        >>> import shardwright as sw
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         table = sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])
        ...         self.bags = sw.EmbeddingBagCollection([table])
        ...     def forward(self, batch):
        ...         output = self.bags(batch).values()
        ...         return output.sum(), output
        >>> model = sw.DistributedModelParallel(Model(), env=sw.ShardingEnv.local(device_type="cpu"))
        >>> pipeline = sw.EvalPipelineSparseDist(model, None, "cpu")
        >>> batches = iter([sw.KeyedJaggedTensor.from_lists({"item": [[1, 2], []]})])
        >>> pipeline.progress(batches).shape
        torch.Size([2, 8])
    """

    @staticmethod
    def stages(forward: Callable[[Any], Any] | None = None) -> list[PipelineStage]:
        """Make its stages: a copy, the exchange of ids, and a forward pass without gradients."""
        return [CopyToDevice(), ExchangeHeaders(), ExchangeIds(), Evaluate(forward)]


class _LockstepIterator(Iterator[In]):
    def __init__(self, model: nn.Module, batches: Iterable[In], settings: BatchSettings) -> None:
        self._batches, self._overlaps = BatchesInStep(model, settings), settings.overlaps
        self._iterator = iter(batches)
        self._has_begun = self._is_over = False

    def __next__(self) -> In:
        if self._is_over:
            raise StopIteration
        if self._has_begun and self._batches.learns:
            self._batches.learn()
        self._batches.drop_unused()
        self._has_begun = True
        try:
            step = self._batches.take(self._iterator)
        except StopIteration:
            self._is_over = True
            raise
        self._batches.raise_late()
        self._batches.serve()
        if self._overlaps:
            self._batches.begin_next_after_lookups(self._iterator)
        batch: In = step.batch
        return batch


@checked
def lockstep_batches(
    model: nn.Module,
    batches: Iterable[In],
    *,
    device: torch.device | str | None = None,
    end_of_data: EndOfData = "first_rank",
    empty_batch: Callable[[], In] | None = None,
    overlap: bool = True,
) -> Iterator[In]:
    """Iterate over batches in your own training loop, with one end of data for all ranks; every rank calls this.

    Ranks may have different numbers of batches, and some none at all. As in :class:`TrainPipelineSparseDist`, a batch
    is read, and its ids are exchanged, while the batch before it computes: in the model's call, once the results of its
    lookups are being sent. That exchange tells whether every rank has a batch. It takes no further collective,
    except for the first batch, and for models that make their collections' inputs themselves.

    Args:
        model: the sharded model, which is given every batch once.
        batches: this rank's batches.
        device: device that they are copied to; by default they stay.
        end_of_data: ``"first_rank"`` or ``"last_rank"``, as in :class:`TrainPipeline`.
        empty_batch: function that makes a batch without examples, as in :class:`TrainPipeline`.
        overlap: ``False`` reads and exchanges a batch only when it is asked for, so that nothing is in progress between
            two batches, as :meth:`DistributedModelParallel.reshard` wants it. The same on all ranks.

    Returns:
        An iterator over the batches.

    Raises:
        InvalidInputError: there is no such ``end_of_data``. The iterator raises it if a rank's batch is wrong, with the
            same text on every rank.

    Example:
        >>> for batch in lockstep_batches(model, loader, end_of_data="last_rank"):  # doctest: +SKIP
        ...     model(batch).sum().backward()
    """
    place = None if device is None else torch.device(device)
    settings = BatchSettings(place, end_of_data, empty_batch, overlaps=overlap)
    return _LockstepIterator(model, batches, settings)
