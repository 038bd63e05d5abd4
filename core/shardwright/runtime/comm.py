"""Collectives over a process group of ``torch.distributed``; comm backends choose the group's backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.errors import DistributedError


class _LabelledWork:
    """A collective whose failure says what was exchanged and by which rank."""

    def __init__(self, work: Any, label: str, rank: int, *kept: Tensor) -> None:
        self._work, self._label, self._rank = work, label, rank
        self._kept = kept  # the backend reads and writes these until it is done

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise DistributedError(
                f"rank {self._rank}: the exchange of {self._label} failed: {error}"
            ) from error
        self._kept = ()


class TorchCommunicator(Communicator):
    """The collectives of ``torch.distributed`` over one process group.

    Args:
        process_group: the group; every rank of it makes the same calls in the same order.
        device: where small control messages live (the CPU, or the rank's accelerator).
    """

    def __init__(self, process_group: Any, device: torch.device) -> None:
        self._group = process_group
        self._device = device
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)

    def all_to_all(  # noqa: D102 - described in the base class
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        try:
            work = dist.all_to_all_single(
                output, input, list(output_splits), list(input_splits), group=self._group, async_op=True
            )
        except RuntimeError as error:
            raise DistributedError(f"rank {self.rank}: the exchange of {label} failed: {error}") from error
        return _LabelledWork(work, label, self.rank, output, input)

    def broadcast(self, tensor: Tensor, source: int) -> None:  # noqa: D102
        dist.broadcast(tensor, group=self._group, group_src=source)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:  # noqa: D102
        shapes = self.all_gather_objects(tuple(tensor.shape))
        gathered = []
        for source, shape in enumerate(shapes):
            piece = tensor.contiguous() if source == self.rank else tensor.new_empty(shape)
            self.broadcast(piece, source)
            gathered.append(piece)
        return gathered

    def all_gather_objects(self, value: Any) -> list[Any]:  # noqa: D102
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def broadcast_object(self, value: Any, source: int = 0) -> Any:  # noqa: D102
        values = [value if self.rank == source else None]
        dist.broadcast_object_list(values, group=self._group, group_src=source, device=self._device)
        return values[0]

    def barrier(self) -> None:  # noqa: D102
        dist.barrier(group=self._group)
