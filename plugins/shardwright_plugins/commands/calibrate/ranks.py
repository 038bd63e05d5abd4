"""The ranks that are measured: processes that are started here, or those of a running job on its hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from attrs import frozen

from shardwright.cli.plans import check_writable
from shardwright.errors import InvalidInputError

_TIMEOUT_S = 300.0
_LAUNCHED = ("RANK", "WORLD_SIZE")


@frozen
class Ranks:
    """Ranks on hosts of equally many.

    Args:
        size: number of ranks.
        local_size: ranks of a host, which are neighbours.
        is_first: this process is to write what is found: it is rank 0, or started the ranks.
        run: function ``run(function, *args, **kwargs)`` that calls a module's function on every rank, and returns all
            results, in the order of the ranks.
    """

    size: int
    local_size: int
    is_first: bool
    run: Callable[..., list[Any]]

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.size // self.local_size


def is_rank() -> bool:
    """True in a process that a launcher started as a rank of a job."""
    return all(os.environ.get(name) for name in _LAUNCHED)


@contextmanager
def started(output: Path, count: int) -> Iterator[Ranks]:
    """Start ranks on this host, and end them afterwards.

    Args:
        output: file that is to be written.
        count: number of ranks, a process of one thread each.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    from shardwright_testing.ranks import RankPool

    check_writable(output)
    with RankPool(count, backend="gloo") as pool:

        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
            return pool.run(function, count, *args, timeout_s=_TIMEOUT_S, **kwargs)

        yield Ranks(count, count, True, run)


@contextmanager
def of_job(output: Path, asked: int | None = None) -> Iterator[Ranks]:
    """Join the ranks of the job that this process is a rank of; every rank makes the same calls.

    Args:
        output: file that rank 0 is to write.
        asked: number of ranks that are expected.

    Raises:
        InvalidInputError: the job has another number of ranks, or rank 0 cannot write the file; on every rank.
        DistributedError: ranks do not come, or their hosts have unlike numbers of them.
    """
    import torch
    import torch.distributed as dist

    from shardwright.runtime.ranks.environment import ShardingEnv

    torch.set_num_threads(1)
    joins = not dist.is_initialized()
    if joins:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    env = ShardingEnv.from_process_group(device_type="cpu")
    if asked is not None and asked != env.world_size:
        raise InvalidInputError(
            f"--ranks is {asked}, and this job has {env.world_size} ranks: leave it out where the launcher starts them"
        )

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        with env.together("calibrate"):
            own = function(*args, **kwargs)
            env.agree("calibrate")
            return env.communicator.all_gather_objects(own)

    run(check_writable, output if env.rank == 0 else None)
    yield Ranks(env.world_size, env.local_world_size, env.rank == 0, run)
    # Only where all went well: else the process ends, and must not wait for ranks that are gone.
    if joins:
        dist.destroy_process_group()
