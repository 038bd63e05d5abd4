"""Ports of a test's own, and process groups of its process alone."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Below 32 768, where Linux begins with the ports that it gives to who asks for any, or connects.
_PORTS = range(12_000, 32_000)


def own_port() -> int:
    """A free port of localhost that the system gives to no other process before it is used."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with suppress(OSError), socket.create_server(("localhost", port)):
            return port


@contextmanager
def group_of_one(backend: str = "gloo", **options: Any) -> Iterator[Any]:
    """The world's process group, of one rank."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def nccl_group_of_one() -> Iterator[Any]:
    """The same over NCCL on the current CUDA device; skips the test where there is none."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        pytest.skip("no CUDA device, or torch without NCCL")
    device = torch.device("cuda", torch.cuda.current_device())
    with group_of_one("nccl", device_id=device) as group:
        yield group
