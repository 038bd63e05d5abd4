"""The ``nccl`` backend: collectives between CUDA devices; headers and objects travel beside them between CPUs."""

from __future__ import annotations

from typing import Any, ClassVar

from shardwright.contracts import CommBackend
from shardwright.contracts.comm_backend import Communicator


class Nccl(CommBackend):
    """Tensors on CUDA devices, sent by NCCL; each rank uses its current device. What the host reads goes by gloo."""

    name: ClassVar[str] = "nccl"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def connect(self, process_group: Any) -> Communicator:  # noqa: D102 - described in the base class
        import torch

        from shardwright.runtime.ranks.devices import with_index
        from shardwright_plugins.comm_backends._device_watch import DeviceWatch
        from shardwright_plugins.comm_backends.torch_communicator import TorchCommunicator

        device = with_index(torch.device("cuda"))
        watch = DeviceWatch.of(process_group, device)
        return TorchCommunicator(process_group, device, beside=beside(process_group), watch=watch)


def beside(process_group: Any) -> Communicator:
    """The collectives between the CPUs of a group's ranks: by the group itself, or by a gloo group of its own.

    Every rank of the group makes this call.
    """
    import torch.distributed as dist

    from shardwright.runtime.ranks.group_ranks import GroupRanks
    from shardwright_plugins.comm_backends.gloo import connect_between_cpus

    if "cpu:gloo" in str(dist.get_backend_config(process_group)).split(","):
        return connect_between_cpus(process_group)
    return connect_between_cpus(GroupRanks.of(process_group).channel("objects", "gloo"))
