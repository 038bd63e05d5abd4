"""Conformance tests of comm backends, in real processes, since a backend connects processes.

Legend: W ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.contracts import CommBackend
from shardwright.contracts.comm_backend import Communicator
from shardwright_testing.ranks import RankError, RankPool

WORLD_SIZE = 3
GROUP_TIMEOUT_S = 4.0
"""Of the group in which a rank is left alone."""

_DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32)


class CommBackendTests:
    """The tests of a comm backend: give the fixture ``comm_backend``, an instance of an importable class.

    Three processes are started on this machine, with a process group of the backend of ``torch.distributed`` that has
    the backend's name, or of gloo.
    """

    def test_devices_are_named(self, comm_backend: CommBackend) -> None:
        """The preferred first."""
        assert comm_backend.devices, f"{comm_backend.name}: names no device whose tensors it sends"

    def test_collectives_equal_a_reference(self, comm_backend: CommBackend) -> None:
        """All of them, of several types, with unequal and empty splits, several at once, waited for in any order."""
        _run(_check_collectives, comm_backend)

    def test_rank_that_does_not_come_is_an_error_on_the_others(self, comm_backend: CommBackend) -> None:
        """Within the process group's time-out."""
        _run(_check_left_alone, comm_backend)


def _run(check: Any, backend: CommBackend) -> None:
    _skip_without(backend.devices[0])
    group = backend.name if dist.is_backend_available(backend.name) else "gloo"
    with RankPool(WORLD_SIZE, backend=group) as pool:
        try:
            pool.run(check, WORLD_SIZE, backend, timeout_s=90.0)
        except RankError as error:
            first = next(iter(error.errors.values())).strip().splitlines()[-1]
            raise AssertionError(f"{backend.name}: {first}\n{error}") from None


def _skip_without(device: str) -> None:
    if device == "cpu":
        return
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if found is not None and found.type == device else 0
    if count < WORLD_SIZE:
        pytest.skip(f"{count} devices of type {device!r} are here, {WORLD_SIZE} are needed")


def _connect(backend: CommBackend, group: Any) -> tuple[Communicator, torch.device]:
    device = torch.device(backend.devices[0])
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_rank())
        torch.accelerator.set_device_index(dist.get_rank())
    return backend.connect(group), device


def _check_collectives(backend: CommBackend) -> None:
    """Run the checks on each rank."""
    communicator, device = _connect(backend, dist.group.WORLD)
    mine = (communicator.rank, communicator.world_size)
    assert mine == (dist.get_rank(), WORLD_SIZE), f"(rank, world_size) is {mine}"
    for dtype in _DTYPES:
        _check_exchange(communicator, device, dtype)
    _check_many_under_way(communicator, device)
    _check_sums(communicator, device)
    _check_gathering(communicator, device)
    communicator.barrier()


def _count(source: int, to: int, *, salt: int) -> int:
    """Return the number of values that a rank sends another: some none, and with some salts nobody anything."""
    return 0 if salt == 5 else (source + 2 * to + salt) % 4


def _values(source: int, to: int, *, salt: int) -> list[int]:
    return [10 * source + to + salt + index for index in range(_count(source, to, salt=salt))]


def _exchange(
    communicator: Communicator, device: torch.device, dtype: torch.dtype, salt: int
) -> tuple[Any, Tensor, Tensor]:
    """An exchange under way, where its output will be, and what that must be."""
    rank, ranks = communicator.rank, range(communicator.world_size)
    sent = [value for to in ranks for value in _values(rank, to, salt=salt)]
    wanted = [value for source in ranks for value in _values(source, rank, salt=salt)]
    output = torch.full((len(wanted),), 99, dtype=dtype, device=device)
    work = communicator.all_to_all(
        output,
        torch.tensor(sent, dtype=dtype, device=device),
        [_count(source, rank, salt=salt) for source in ranks],
        [_count(rank, to, salt=salt) for to in ranks],
        label=f"values {salt}",
    )
    return work, output, torch.tensor(wanted, dtype=dtype)


def _check_exchange(communicator: Communicator, device: torch.device, dtype: torch.dtype) -> None:
    for salt in (0, 1, 5):
        work, output, wanted = _exchange(communicator, device, dtype, salt)
        for _ in range(2):  # asked again, it has nothing left to do
            work.wait()
        _equal(f"all_to_all of {dtype}, splits {salt}", output, wanted)


def _check_many_under_way(communicator: Communicator, device: torch.device) -> None:
    under_way = [_exchange(communicator, device, torch.float32, salt) for salt in range(4)]
    for salt, (work, output, wanted) in reversed(list(enumerate(under_way))):
        work.wait()
        _equal(f"all_to_all {salt} of 4 under way", output, wanted)


def _check_sums(communicator: Communicator, device: torch.device) -> None:
    # Whole numbers with whole means, which all dtypes hold.
    scales = torch.tensor([[3.0**rank * communicator.world_size] for rank in range(communicator.world_size)])
    terms = torch.arange(5.0) * scales
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for mean, wanted in ((False, terms.sum(0)), (True, terms.mean(0))):
            values = terms[communicator.rank].to(device, dtype, copy=True)
            work = communicator.all_reduce(values, mean=mean, label="sums")
            for _ in range(2):  # asked again, it has nothing left to do
                work.wait()
            _equal(f"all_reduce of {dtype}, {mean=}", values, wanted)


def _check_gathering(communicator: Communicator, device: torch.device) -> None:
    rank, ranks = communicator.rank, range(communicator.world_size)
    for source in ranks:
        tensor = torch.full((2, 3), float(rank), device=device)
        communicator.broadcast(tensor, source)
        _equal(f"broadcast from rank {source}", tensor, torch.full((2, 3), float(source)))
        told = communicator.broadcast_object({"from": rank}, source)
        assert told == {"from": source}, f"broadcast_object from rank {source} gives {told}"
    objects = communicator.all_gather_objects(("rank", rank))
    assert objects == [("rank", other) for other in ranks], f"all_gather_objects gives {objects}"


def _equal(what: str, actual: Tensor, wanted: Tensor) -> None:
    got = actual.cpu()
    assert got.shape == wanted.shape, (
        f"{what}: the shape is {list(got.shape)}, it must be {list(wanted.shape)}"
    )
    assert torch.equal(got, wanted.to(got.dtype)), f"{what}: got {got.tolist()}, it must be {wanted.tolist()}"


def _check_left_alone(backend: CommBackend) -> None:
    """Rank 0 begins an exchange that no other rank comes to; they wait until it has failed."""
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    communicator, device = _connect(backend, group)
    communicator.barrier()
    failed = True
    if communicator.rank == 0:
        failed = _fails(communicator, device)
    everybody: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everybody, failed)
    assert everybody[0], "an exchange to which no other rank came ended without an error"


def _fails(communicator: Communicator, device: torch.device) -> bool:
    """True if an exchange raises."""
    values, splits = torch.ones(WORLD_SIZE, device=device), [1] * WORLD_SIZE
    try:
        communicator.all_to_all(torch.empty_like(values), values, splits, splits, label="nothing").wait()
    except Exception:
        return True
    return False
