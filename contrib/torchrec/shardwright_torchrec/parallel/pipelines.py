"""Training loops with TorchRec's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwright as sw


class TrainPipelineBase(sw.TrainPipelineBase):
    """A loop that trains one batch after the other.

    Args:
        model: the sharded model.
        optimizer: the optimizer.
        device: this rank's device.
        custom_model_fwd: function of a batch that gives losses and output, instead of the model.
        enable_inplace_copy_batch: not needed.
        further: further arguments of `shardwright.TrainPipelineBase`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Any,
        device: torch.device | str,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        enable_inplace_copy_batch: bool = False,
        **further: Any,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd=custom_model_fwd, **further)
        self._device = torch.device(device)


class TrainPipelineSparseDist(sw.TrainPipelineSparseDist):
    """A loop that exchanges the ids of coming batches while one computes.

    Args:
        model: the sharded model.
        optimizer: the optimizer.
        device: this rank's device.
        execute_all_batches: must be true: batches that were read are trained on.
        apply_jit: must be false.
        context_type: not needed.
        pipeline_postproc: not needed; the model is run as it is.
        custom_model_fwd: function of a batch that gives losses and output, instead of the model.
        dmp_collection_sync_interval_batches: not needed; `DMPCollection` says when its groups synchronise.
        enqueue_batch_after_forward: not needed.
        enable_inplace_copy_batch: not needed.
        free_features_storage_early: not needed.
        clear_data_dist_inputs: not needed.
        async_inplace_copy: not needed; TorchRec 1.9 has it.
        further: further arguments of `shardwright.TrainPipelineSparseDist`.

    Raises:
        UnsupportedError: batches were to be left out, or the model compiled by TorchScript.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Any,
        device: torch.device | str,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: Any = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        async_inplace_copy: bool = False,
        **further: Any,
    ) -> None:
        if not execute_all_batches:
            raise sw.UnsupportedError(
                "execute_all_batches=False would drop batches that were read: end the iterator earlier"
            )
        if apply_jit:
            raise sw.UnsupportedError("apply_jit=True is not supported: torch.compile the model's dense part")
        super().__init__(model, optimizer, device, custom_model_fwd=custom_model_fwd, **further)
        self._device, self._whole_model = torch.device(device), model

    def detach(self) -> nn.Module:
        """Give the model, which runs by itself between steps too; batches under way are kept for `progress`."""
        return self._whole_model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Go on after `detach`.

        Args:
            model: the pipeline's own model, which is the default.
            sparse_dist: not needed; the ids of the next batch are under way already.

        Raises:
            UnsupportedError: it is another model, to which the batches under way were not sent.
        """
        if model is not None and model is not self._whole_model:
            raise sw.UnsupportedError(
                "attach() takes the pipeline's own model, whose ids of the next batch are under way: make another "
                "TrainPipelineSparseDist for another model"
            )
