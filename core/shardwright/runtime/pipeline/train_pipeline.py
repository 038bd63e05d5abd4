"""Train pipelines: the ids of the next batch travel while this one computes.

Every rank makes a step of :class:`TrainPipelineSparseDist` in this order:

1. lookups, whose ids are there already;
2. while their results travel, the next batch is read and copied, and its ids are sent;
3. the rest of the forward pass, and a status word that tells whether it failed;
4. backward pass and update, while ids travel.

The model is not traced. The places of the collections' inputs in a batch are observed in the first step, which is made
as without a pipeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardwright.arguments import checked
from shardwright.errors import DistributedError, InvalidInputError
from shardwright.runtime.pipeline.batch_settings import BatchSettings
from shardwright.runtime.pipeline.batches import BatchesInStep

In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipeline(ABC, Generic[In, Out]):
    """A loop over batches that trains a model, one batch a call.

    The model is given a batch and returns ``(losses, output)``. In training mode the sum of ``losses`` goes backward
    and the optimizer makes a step; in evaluation mode neither.

    A failure on one rank is raised on all ranks, and nothing hangs. A wrong batch or an iterator that raises fails the
    step of that batch; the next ones train. A forward pass that raises fails its step; the next one trains. An error
    in the backward pass or the optimizer closes the pipeline on its rank. The update is then half made, and other
    ranks wait for the rest until the process ends or their time-out.

    Args:
        model: the sharded model, usually a ``DistributedModelParallel``.
        optimizer: optimizer of the dense parameters, or a ``CombinedOptimizer`` of all.
        device: device that batches are copied to.
        end_of_data: ``"first_rank"``: all ranks end with the first whose data ends; ``"last_rank"``: with the last,
            and a rank whose data has ended goes on with empty batches (its gradients are zero, and averages are over
            all ranks as before). The same on all ranks.
        empty_batch: function that makes a batch without examples; by default a batch of the form of the first batch of
            any rank.
        custom_model_fwd: function called instead of the model.

    Raises:
        InvalidInputError: there is no such ``end_of_data``.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Any,
        device: torch.device | str,
        *,
        end_of_data: str = "first_rank",
        empty_batch: Callable[[], In] | None = None,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._forward: Callable[[In], Any] = custom_model_fwd or model
        self._closed_by: BaseException | None = None
        self._batches = BatchesInStep(
            model,
            BatchSettings(
                device=torch.device(device),
                end_of_data=end_of_data,
                empty_batch=empty_batch,
                is_ahead=self._sends_ahead(),
                is_strict=True,
            ),
        )

    @abstractmethod
    def _sends_ahead(self) -> bool:
        """True if ids are sent before their forward pass."""

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Make the next step; every rank makes this call. Profiles name its parts: ``## backward ##``, ...

        Args:
            dataloader_iter: this rank's batches. One batch ahead of the step is read.

        Returns:
            The model's output for the batch.

        Raises:
            StopIteration: the data has ended, on all ranks in the same step. A further call, with another iterator,
                begins anew.
            InvalidInputError: a rank's batch is wrong; the text is the same on every rank.
            DistributedError: another rank failed, or this pipeline is closed.
        """
        if self._closed_by is not None:
            raise DistributedError(
                f"this pipeline was closed by {type(self._closed_by).__name__} in the update of a step: load a "
                "checkpoint and call reset() on all ranks"
            ) from self._closed_by
        batch = self._batches.take(dataloader_iter)
        if self._model.training:
            self._optimizer.zero_grad()
        with self._batches.forward(dataloader_iter), record_function("## forward ##"):
            losses, output = self._pair(self._forward(batch))
        if self._model.training:
            self._update(losses)
        return output

    def _pair(self, result: Any) -> tuple[Tensor, Out]:
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise InvalidInputError(
                f"the model returned a {type(result).__name__}; a pipeline wants (losses, output): wrap the model, or "
                "give custom_model_fwd"
            )
        losses, output = result
        return losses, output

    def _update(self, losses: Tensor) -> None:
        try:
            with record_function("## backward ##"):
                losses.sum().backward()
            with record_function("## optimizer ##"):
                self._optimizer.step()
        except BaseException as error:
            self._closed_by = error
            raise

    def reset(self) -> None:
        """Drop the batches under way and begin anew; every rank makes this call."""
        self._batches.reset()
        self._closed_by = None


class TrainPipelineBase(TrainPipeline[In, Out]):
    """A pipeline that copies the next batch to the device while this one computes.

    Ids are exchanged in the forward pass. It serves models whose collections get their inputs from changing places of
    the batch. Before each step the ranks exchange a status word.
    """

    def _sends_ahead(self) -> bool:
        return False


class TrainPipelineSparseDist(TrainPipeline[In, Out]):
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

    def _sends_ahead(self) -> bool:
        return True


class _LockstepIterator(Iterator[In]):
    def __init__(self, model: nn.Module, batches: Iterable[In], settings: BatchSettings) -> None:
        self._batches = BatchesInStep(model, settings)
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
            batch: In = self._batches.take(self._iterator)
        except StopIteration:
            self._is_over = True
            raise
        self._batches.serve()
        return batch


def lockstep_batches(
    model: nn.Module,
    batches: Iterable[In],
    *,
    device: torch.device | str | None = None,
    end_of_data: str = "first_rank",
    empty_batch: Callable[[], In] | None = None,
) -> Iterator[In]:
    """Iterate over batches in your own training loop, with one end of data for all ranks; every rank calls this.

    Ranks may have different numbers of batches, and some none at all. The ids of a batch are exchanged before the
    iterator returns it, which tells whether every rank has one. That takes no further collective, except for the first
    batch, and for models that make their collections' inputs themselves.

    Args:
        model: the sharded model, which is given every batch once.
        batches: this rank's batches.
        device: device that they are copied to; by default they stay.
        end_of_data: ``"first_rank"`` or ``"last_rank"``, as in :class:`TrainPipeline`.
        empty_batch: function that makes a batch without examples, as in :class:`TrainPipeline`.

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
    settings = BatchSettings(place, end_of_data, empty_batch)
    return _LockstepIterator(model, batches, settings)
