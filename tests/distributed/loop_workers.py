"""What ranks do in the tests of training loops that people write; importable by their processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist
from attrs import evolve
from tests.equality import Case, count_profiled, train_rank

from shardwright import ShardingEnv


def error_of(function: Callable[[], Any]) -> str:
    """The error that a call raises, as ``"Kind: text"``; ``"nothing was raised"``."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def local_world_sizes_that_differ(case: Case, how: str) -> str:
    """Train where rank 1 takes a host to have another number of ranks; returns the error.

    Args:
        case: what is trained.
        how: whether the variable differs, or is ``"no number"``, or an environment made by hand differs.
    """
    size = 1 if dist.get_rank() == 1 else 2
    told = "many" if how == "no number" and size == 1 else str(size)
    if how == "by hand":
        env = evolve(ShardingEnv.from_process_group(), local_world_size=size)
        return error_of(lambda: train_rank(case, env, case.module(), count_profiled))
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": told}):
        return error_of(ShardingEnv.from_process_group)
