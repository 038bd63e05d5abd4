"""What the ranks of `test_ranks` do; importable by their processes."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def place() -> tuple[int, int, str, str]:
    return dist.get_rank(), dist.get_world_size(), os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]


def add(number: float, *, twice: bool) -> float:
    total = torch.tensor(number + dist.get_rank())
    dist.all_reduce(total)
    return float(total) * (1 + twice)


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has a bad day")
    return "fine"


def sleep_on(rank: int, seconds: float) -> str:
    if dist.get_rank() == rank:
        time.sleep(seconds)
    return "fine"


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os._exit(3)
    return "fine"


def not_picklable() -> object:
    return lambda: 1


def process_id() -> int:
    return os.getpid()


MARKS: list[str] = []


def mark() -> None:
    MARKS.append("initialised")


def marks() -> list[str]:
    return MARKS
