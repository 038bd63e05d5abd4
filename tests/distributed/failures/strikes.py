"""What befalls a rank while the others wait for it. Ranks find each other in the store; nobody counts on a pause."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwright import ShardingEnv

VICTIM = 1
_LONGEST = timedelta(seconds=100)


def time_out(fault: str, short_s: float = 6.0) -> timedelta:
    """Time-out of the ranks: a kill is seen at once, however long it is; for others a short one is waited out, s."""
    return _LONGEST if fault.startswith("kill") else timedelta(seconds=short_s)


def env_of(fault: str = "kill") -> ShardingEnv:
    """Ranks of a new group with the time-out for a fault."""
    return ShardingEnv.from_process_group(dist.new_group(timeout=time_out(fault)))


def strike(fault: str, *, victim: int = VICTIM) -> None:
    """Befall the victim, when all other ranks have come to the same place; they go on together.

    Args:
        fault: ``"kill"``, ``"stop"`` (the process), or ``"stall"`` (the thread), both until all others have failed
            (:func:`told`).
        victim: rank of it.
    """
    if dist.get_rank() != victim:
        _store().set(f"arrived/{dist.get_rank()}", "")
    _await("arrived", victim)
    if dist.get_rank() != victim:
        return
    if fault == "kill":
        time.sleep(0.2)  # what was sent before is read, too
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        _store().set("stopped", f"{os.getpid()}")
        os.kill(os.getpid(), signal.SIGSTOP)
    _await("told", victim)


@contextmanager
def told() -> Iterator[None]:
    """Let a victim that is stopped or stalled go on when this is left, on all other ranks."""
    try:
        yield
    finally:
        _store().set(f"told/{dist.get_rank()}", "")
        if _store().check(["stopped"]):
            os.kill(int(_store().get("stopped")), signal.SIGCONT)


def _await(what: str, victim: int) -> None:
    others = [rank for rank in range(dist.get_world_size()) if rank != victim]
    _store().wait([f"{what}/{rank}" for rank in others], _LONGEST)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
