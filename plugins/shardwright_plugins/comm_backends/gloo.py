"""The ``gloo`` backend: collectives between CPUs."""

from __future__ import annotations

from typing import Any, ClassVar

from shardwright.contracts import CommBackend
from shardwright.contracts.comm_backend import Communicator


class Gloo(CommBackend):
    """Tensors on the CPU, sent by gloo."""

    name: ClassVar[str] = "gloo"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def connect(self, process_group: Any) -> Communicator:  # noqa: D102 - described in the base class
        import torch

        from shardwright.runtime.comm import TorchCommunicator

        return TorchCommunicator(process_group, torch.device("cpu"))
