"""Ranks whose collectives a stand-in for a device waits for, and not the host; importable by their processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed.failures.strikes import strike, told

from shardwright.errors import DistributedError
from shardwright.runtime.ranks import group_store
from shardwright.runtime.ranks.group_ranks import GroupRanks
from shardwright_plugins.comm_backends._device_watch import DeviceWatch, Marks, Query
from shardwright_plugins.comm_backends.nccl import beside
from shardwright_plugins.comm_backends.torch_communicator import AllToAll, TorchCommunicator, TorchTransport

FAR_OFF_S = 300.0  # longer than the test may take: who waits for this time-out fails it


class Device(Marks):
    """A device whose stream holds collectives, and that never learns that one of them has failed."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.is_aborted = False

    def put(self) -> Query:
        before = list(self.queue)
        return lambda: all(work.is_completed() and work.is_success() for work in before)

    def put_again(self) -> Query:
        return self.put()

    def synchronize(self) -> None:
        """Block the host until the device has done all."""
        everything = self.put()
        while not (everything() or self.is_aborted):
            time.sleep(0.01)

    def abort(self) -> None:
        self.is_aborted = True


class InStream(TorchTransport):
    """Collectives that the host does not wait for."""

    def __init__(self, group: Any, device: Device) -> None:
        super().__init__(group)
        self._device = device

    def start(self, call: AllToAll) -> Any:
        work = super().start(call)

        class Queued:
            def wait(_) -> None:
                self._device.queue.append(work)

        return Queued()


@contextmanager
def connected(timeout_s: float) -> Iterator[tuple[TorchCommunicator, Device]]:
    """A communicator as of a device backend, over gloo."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    with mock.patch.object(group_store, "_LONGEST_GRACE_S", 2.0):  # which is waited out
        ranks, device = GroupRanks.of(group), Device()
    limit_s = ranks.timeout_s - 1.5 * ranks.store.grace_s
    watch = DeviceWatch(device, ranks.store.lost, ranks.failure, device.abort, limit_s)
    yield (
        TorchCommunicator(
            group, torch.device("cuda"), InStream(group, device), beside=beside(group), watch=watch
        ),
        device,
    )


def lose_a_rank(fault: str) -> str:
    """Exchange twice; rank 1 is lost before the second. The others wait for the device, then make the next call."""
    with connected(6.0 if fault == "stall" else FAR_OFF_S) as (communicator, device):
        splits = [1] * communicator.world_size
        values = torch.ones(communicator.world_size)
        try:
            with told():
                for step in range(3):
                    if step == 1:
                        strike(fault)
                    output = torch.empty_like(values)
                    communicator.all_to_all(output, values, splits, splits, label="results").wait()
                    device.synchronize()
        except DistributedError as error:
            return f"step {step}: {error}"
    return "nothing was raised"
