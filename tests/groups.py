"""Process groups of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist


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
