"""What ranks do in the tests of pieces that travel through shared memory; importable by their processes."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed.failures import faults
from tests.distributed.failures.strikes import env_of, strike
from tests.distributed.workers import or_error, train_case
from tests.equality import Case, RankResult

from shardwright import ShardingEnv
from shardwright_plugins.comm_backends import _mailboxes as mailboxes
from shardwright_plugins.comm_backends import _same_host as same_host
from shardwright_plugins.comm_backends import _segments
from shardwright_plugins.comm_backends.settings import SHARED_MEMORY_VARIABLE
from shardwright_plugins.comm_backends.torch_communicator import TorchCommunicator

LARGE = same_host.LEAST_BYTES // 4 + 5  # float32 values
ROUNDS = 12


def memory_of_nobody(
    process: int, descriptor: int, size: int, *, serial: int, num_peers: int
) -> _segments.Segment:
    """What the number of a rank's process leads to on another host that has the same name: some other memory."""
    return _segments.Segment.create(size, serial=serial, num_peers=num_peers)


FULL = OSError(errno.ENOSPC, "no memory")
HINDRANCES: dict[str, Callable[[], Any]] = {
    "no memory on one rank": lambda: mock.patch.object(_segments.Segment, "create", side_effect=FULL),
    "one rank's memory is used up": lambda: mock.patch.object(_segments.Segments, "_grow", side_effect=FULL),
    "one rank cannot read": lambda: mock.patch.object(_segments.Segment, "open", side_effect=FULL),
    "hosts that look alike": lambda: mock.patch.object(
        _segments.Segment, "open", side_effect=memory_of_nobody
    ),
    "turned off": lambda: mock.patch.dict(os.environ, {SHARED_MEMORY_VARIABLE: "off"}),
    "turned off on one rank": lambda: mock.patch.dict(os.environ, {SHARED_MEMORY_VARIABLE: "off"}),
}
"""What may be in the way of shared memory: on rank 1 where the name speaks of one rank, or on all."""


def circumstance(name: str) -> Any:
    is_here = name in HINDRANCES and ("one rank" not in name or dist.get_rank() == 1)
    return HINDRANCES[name]() if is_here else nullcontext()


def count_of(source: int, to: int, salt: int) -> int:
    """Some pieces are large, some small, some empty, and one is larger than any before."""
    kinds = (LARGE, 3, 0, LARGE + 7, 9 * LARGE + 1 if salt == 5 else 2 * LARGE)
    return kinds[(source + 2 * to + salt) % len(kinds)]


def piece_of(source: int, to: int, salt: int) -> torch.Tensor:
    return torch.arange(count_of(source, to, salt), dtype=torch.float32) + 1000 * salt + 10 * source + to


def exchange(communicator: Any, salt: int, *, how: str) -> Any:
    """An exchange under way, and what looks at its pieces when it was waited for."""
    rank, ranks = communicator.rank, range(communicator.world_size)
    pieces = [piece_of(rank, to, salt) for to in ranks]
    splits = [count_of(source, rank, salt) for source in ranks]
    sent = [piece.numel() for piece in pieces]
    made = torch.cat(pieces)
    if how == "from its room":
        made = communicator.room(made.numel(), "cpu").copy_(made)
    if how == "copied":
        output = torch.full((sum(splits),), -1.0)
        work = communicator.all_to_all(output, made, splits, sent, label="values")
        return lambda: (work.wait(), output.split(splits), lambda: None)
    work = communicator.exchange(made, splits, sent, label="values")
    del made
    return lambda: (None, work.wait(), work.release)


def exchange_all(hindrance: str, how: str) -> tuple[bool, int, int]:
    """Several rounds of three exchanges under way, waited for in any order.

    Returns:
        Whether all arrived as it was sent; the peers whose memory is read; and the segments that were made here.
    """
    with circumstance(hindrance):
        communicator = ShardingEnv.from_process_group().communicator
        assert isinstance(communicator, TorchCommunicator)
        right = True
        for number in range(ROUNDS):
            under_way = [(salt, exchange(communicator, salt, how=how)) for salt in (0, 1, number % 6)]
            for salt, wait in under_way[:: 1 if number % 2 else -1]:
                _, pieces, release = wait()
                for source, piece in enumerate(pieces):
                    right &= torch.equal(piece, piece_of(source, communicator.rank, salt))
                release()
        used = communicator._transport
        if not isinstance(used, same_host.SameHostTransport):
            return right, 0, 0
        return (
            right,
            0 if used.mail is None else len(used.mail.peers),
            used.segments._last_serial,
        )


def drop_exchanges(num_rounds: int) -> tuple[list[int], bool]:
    """Rounds of three exchanges: one is waited for, then that before it; the one between is dropped, early or late.

    Returns:
        How many messages are kept after each round, and whether those that were waited for are right.
    """
    communicator = ShardingEnv.from_process_group().communicator
    assert isinstance(communicator, TorchCommunicator)
    kept, right = [], True
    for number in range(num_rounds):
        under_way = [_small(communicator, float(3 * number + place)) for place in range(3)]
        is_early = (number + communicator.rank) % 2
        for place in (1, 2, 0) if is_early else (2, 1, 0):
            work, output, expected = under_way[place]
            if place != 1:
                work.wait()
                right &= output.tolist() == expected
            del work
            under_way[place] = None
        mail = communicator._transport.mail  # type: ignore[attr-defined]
        kept.append(len(mail.early))
    return kept, right


def _small(communicator: TorchCommunicator, value: float) -> Any:
    """An exchange of one value for each rank under way, what it arrives in, and what is to arrive."""
    size = communicator.world_size
    output, each = torch.zeros(size), [1] * size
    sent = torch.full((size,), value + 1000 * communicator.rank)
    work = communicator.all_to_all(output, sent, each, each, label="values")
    return work, output, [value + 1000 * source for source in range(size)]


def reads_in_place(hindrance: str) -> list[bool]:
    """What the communicator says of one value, and of many."""
    with circumstance(hindrance):
        communicator = ShardingEnv.from_process_group().communicator
        return [communicator.reads_in_place(count) for count in (1, LARGE)]


def train_by_memory(case: Case) -> RankResult:
    with faults.carried_by("references"):
        return train_case(case)


@or_error
def leave_before_meeting() -> None:
    """Kill rank 1 before the first large piece."""
    communicator = env_of().communicator
    strike("kill")
    sizes = [0, LARGE]
    communicator.all_to_all(torch.empty(LARGE), torch.ones(LARGE), sizes, sizes, label="values").wait()


def read_late() -> bool:
    """Rank 0 forgets the group as soon as it can; rank 1 reads what it was sent only then."""
    communicator = ShardingEnv.from_process_group(dist.new_group()).communicator
    to_each = [LARGE, LARGE]
    output = torch.zeros(2 * LARGE)
    work = communicator.all_to_all(output, torch.ones(2 * LARGE), to_each, to_each, label="values")
    if dist.get_rank() == 0:
        work.wait()
        del work, communicator
        gc.collect()
    dist.barrier()
    if dist.get_rank() == 1:
        work.wait()
    return bool((output == 1).all())


def exchange_in_inference_mode_first() -> list[bool]:
    """One exchange in inference mode, and then others outside."""
    with faults.carried_by("references"):
        communicator = ShardingEnv.from_process_group().communicator
        right: list[bool] = []
        for is_inference in (True, False, False):
            with torch.inference_mode(is_inference):
                pieces = enumerate(exchange(communicator, 1, how="copied")()[1])
                right += [torch.equal(own, piece_of(peer, communicator.rank, 1)) for peer, own in pieces]
        return right


def connect_again() -> list[bool]:
    """Connect to one group again and again, each time without the connection before; who is late differs."""
    readable = []
    for number in range(3):
        communicator = ShardingEnv.from_process_group().communicator
        if communicator.rank == number % 2:
            time.sleep(0.1)
        exchange(communicator, 0, how="copied")()
        exchange(communicator, 1, how="copied")()
        readable.append(communicator._transport.mail is not None)
        del communicator
        gc.collect()
    return readable


def wait_in_opposite_orders() -> list[bool]:
    """Two exchanges for whose pieces there is no memory left, waited for first come, or last come, first served."""
    communicator = env_of().communicator
    exchange(communicator, 0, how="copied")()  # the ranks find out that they share memory
    with mock.patch.object(_segments.Segments, "free", side_effect=OSError(errno.ENOSPC, "no memory")):
        under_way = []
        for value in (1.0, 2.0):
            output, sizes = torch.zeros(2 * LARGE), [LARGE, LARGE]
            sent = torch.full((2 * LARGE,), value)
            under_way.append((communicator.all_to_all(output, sent, sizes, sizes, label="values"), output))
        for work, _ in under_way[:: -1 if communicator.rank else 1]:
            work.wait()
    return [bool((output == value).all()) for value, (_, output) in enumerate(under_way, 1)]


def send_more_than_there_is_room_for() -> bool:
    """Both ranks start more exchanges than their messages have room for, and wait for the last first."""
    communicator = env_of().communicator
    count = mailboxes.ring_bytes(2) // mailboxes.MESSAGES // 4 - 1
    number = 3 * mailboxes.MESSAGES
    sizes, under_way = [count, count], []
    for value in range(number):
        output, sent = torch.zeros(2 * count), torch.full((2 * count,), float(value))
        under_way.append((communicator.all_to_all(output, sent, sizes, sizes, label="values"), output))
    for work, _ in reversed(under_way):
        work.wait()
    return all(bool((output == value).all()) for value, (_, output) in enumerate(under_way))


@or_error
def exchange_other_sizes() -> None:
    """Send three values from rank 1 where rank 0 expects two."""
    communicator = env_of().communicator
    sent, arriving = ([0, 2], [0, 2]) if communicator.rank == 0 else ([3, 0], [2, 0])
    output, input = torch.zeros(sum(arriving)), torch.ones(sum(sent))
    communicator.all_to_all(output, input, arriving, sent, label="values").wait()
