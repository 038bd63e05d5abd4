"""The ``gloo`` backend: collectives between CPUs."""

from __future__ import annotations

from typing import Any, ClassVar

from shardwright.contracts import CommBackend
from shardwright.contracts.comm_backend import Communicator


class Gloo(CommBackend):
    """Tensors on the CPU, sent by gloo; large pieces for ranks of the same host through shared memory."""

    name: ClassVar[str] = "gloo"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def connect(self, process_group: Any) -> Communicator:  # noqa: D102 - described in the base class
        import torch

        from shardwright.runtime.comm import TorchCommunicator
        from shardwright.runtime.roll_call import store_of
        from shardwright_plugins.comm_backends._quiet_end import let_go_at_end
        from shardwright_plugins.comm_backends._same_host import exchange_over

        let_go_at_end()
        exchange = exchange_over(process_group, store_of(process_group))
        return TorchCommunicator(process_group, torch.device("cpu"), exchange)
