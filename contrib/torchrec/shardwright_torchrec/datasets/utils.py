"""Batches of dense and sparse features with labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import shardwright as sw
from shardwright_torchrec.streamable import Pipelineable

PATH_MANAGER_KEY: str = "torchrec"
"""Key under which scripts ask iopath for files."""


@dataclass
class Batch(Pipelineable):
    """A batch ``B``: dense features ``[B, columns]``, sparse features, and labels ``[B]``."""

    dense_features: Tensor
    sparse_features: sw.KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on a device."""
        return Batch(
            self.dense_features.to(device=device, non_blocking=non_blocking),
            self.sparse_features.to(device=device, non_blocking=non_blocking),
            self.labels.to(device=device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        """Keep the tensors' memory until the stream is done with them."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The batch in pinned memory."""
        return Batch(
            self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory()
        )
