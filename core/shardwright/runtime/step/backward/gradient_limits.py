"""Clipping of the gradients of a collection's outputs, element by element: ``max_gradient`` of ``fused_params``.

FBGEMM clips the gradient of each looked-up vector where its kernels read it. Here it is done once, where the gradients
of outputs begin their way, so that every kernel, dataflow and time of update has the same.

Legend: B batch size of this rank, C columns of the pooled output, D columns of an output, N ids of an output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.runtime.ranks.devices import Constant
from shardwright.runtime.step.collection import Collection


class GradientLimits:
    """The largest elements that gradients of outputs may have.

    Args:
        collection: tables and outputs of the module.
        world_size: number of ranks. Gradients are averaged over them later, and limits are those of averages.
    """

    def __init__(self, collection: Collection, world_size: int) -> None:
        of_tables = [
            math.inf if table.max_gradient is None else table.max_gradient for table in collection.tables
        ]
        limits = [of_tables[output.table] * world_size for output in collection.outputs]
        self._limits: list[Constant] = []  # one for each gradient that comes: of each column, or of all
        if min(limits) == math.inf:
            return
        if collection.is_pooled:
            dims = torch.tensor([output.dim for output in collection.outputs])
            self._limits = [Constant(torch.tensor(limits, dtype=torch.float32).repeat_interleave(dims))]
        else:
            self._limits = [Constant(torch.tensor(limit, dtype=torch.float32)) for limit in limits]

    def clipped(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Clip gradients of outputs, into new tensors; the same tensors if there is no limit.

        Args:
            gradients: one tensor ``[B, C]`` for a pooled collection, ``[N, D]`` for each output of another.
        """
        if not self._limits:
            return gradients
        on_device = [limit.on(own.device) for limit, own in zip(self._limits, gradients, strict=True)]
        return [own.clamp(-limit, limit) for own, limit in zip(gradients, on_device, strict=True)]
