"""The ``nccl`` backend: collectives between CUDA devices."""

from __future__ import annotations

from typing import Any, ClassVar

from shardwright.contracts import CommBackend
from shardwright.contracts.comm_backend import Communicator


class Nccl(CommBackend):
    """Tensors on CUDA devices, sent by NCCL; each rank uses its current device."""

    name: ClassVar[str] = "nccl"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def connect(self, process_group: Any) -> Communicator:  # noqa: D102 - described in the base class
        import torch

        from shardwright.runtime.comm import TorchCommunicator

        return TorchCommunicator(process_group, torch.device("cuda", torch.cuda.current_device()))
