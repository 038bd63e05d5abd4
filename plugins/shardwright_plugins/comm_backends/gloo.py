"""The ``gloo`` backend: collectives between CPUs."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from shardwright.contracts import CommBackend
from shardwright.contracts.comm_backend import Communicator

_NOBODYS_TAG = 1 << 21  # above those of pieces that are sent by themselves


class Gloo(CommBackend):
    """Tensors on the CPU, sent by gloo; large pieces for ranks of the same host through shared memory."""

    name: ClassVar[str] = "gloo"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def connect(self, process_group: Any) -> Communicator:  # noqa: D102 - described in the base class
        return connect_between_cpus(process_group)


def connect_between_cpus(process_group: Any) -> Communicator:
    """Connect the CPUs of the ranks of a group with gloo."""
    import torch

    from shardwright.runtime.ranks.group_ranks import GroupRanks
    from shardwright_plugins.comm_backends._quiet_end import let_go_at_end
    from shardwright_plugins.comm_backends._same_host import exchange_over
    from shardwright_plugins.comm_backends.torch_communicator import TorchCommunicator

    let_go_at_end()
    exchange = exchange_over(process_group, GroupRanks.of(process_group).store)
    close = partial(_close, process_group)
    return TorchCommunicator(process_group, torch.device("cpu"), exchange, close)


def _close(process_group: Any) -> None:
    """End all collectives under way: where a message does not come in time, gloo closes the group's connections."""
    import torch
    import torch.distributed as dist

    other = (dist.get_rank(process_group) + 1) % dist.get_world_size(process_group)
    with suppress(RuntimeError):  # as it raises where they are closed already
        never = dist.irecv(torch.empty(1), group=process_group, group_src=other, tag=_NOBODYS_TAG)
        assert never is not None  # this rank is in the group
        never.wait(timedelta(milliseconds=1))
