"""Starts the ranks of the demo on this machine, through torch's elastic launcher, and waits for them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwright import errors
from shardwright.errors import DistributedError

__all__ = ["launch"]

# How often the launcher looks after the ranks, and how long it lets them end by themselves when one has died.
_MONITOR_INTERVAL_S = 0.1
_SHUTDOWN_S = 5


def launch(entrypoint: Callable[..., Any], *arguments: Any, ranks: int, restarts: int = 0) -> Any:
    """Run a function in local processes, one a rank, and give what rank 0 returns.

    Args:
        entrypoint: A function of a module, which `torch.distributed.init_process_group` finds ready.
        arguments: Its arguments; pickled.
        ranks: Number of processes.
        restarts: How often all are started again after one failed or died.

    Raises:
        DistributedError: If a rank fails or dies; names it. The others are ended.
        KeyboardInterrupt: If the user interrupts; the ranks are ended.
    """
    if restarts:
        _use_a_store_per_attempt()
    with tempfile.TemporaryDirectory(prefix="shardwright-demo-") as folder, _calm_elastic():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=f"shardwright-demo-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=restarts,
            monitor_interval=_MONITOR_INTERVAL_S,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            return elastic_launch(config, entrypoint)(*arguments)[0]
        except ChildFailedError as error:
            raise DistributedError(_tell(*error.get_first_failure(), ranks)) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            sys.exit(128 + error.sigval)


def _use_a_store_per_attempt() -> None:
    """Have rank 0 of each attempt serve a store of its own.

    The launcher's store outlives an attempt, and torch 2.13 gives the next one no prefix there. Ranks that were started
    again would read the addresses of those that are gone, and be refused.
    """
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@contextmanager
def _calm_elastic() -> Iterator[None]:
    """Keep the launcher from logging what is raised anyway, and from waiting its half a minute for the ranks."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_S))
    # This process does nothing but wait; torch gives each of its loggers a level of its own.
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


def _tell(rank: int, failure: ProcessFailure, ranks: int) -> str:
    """The text of the error for a rank that failed or died."""
    who = f"rank {rank} of {ranks} (process {failure.pid})"
    # A text, or what the rank's error file holds.
    message: Any = failure.message
    if isinstance(message, dict):
        text = str(message.get("message", message))
        is_ours = hasattr(errors, text.partition(":")[0])
        traceback = (
            "" if is_ours else "\n" + str(message.get("extraInfo", {}).get("py_callstack", "")).rstrip()
        )
        return f"{who} failed: {text}{traceback}"
    if failure.exitcode < 0:
        return f"{who} was killed by signal {-failure.exitcode} ({failure.signal_name()}); the job is ended."
    return f"{who} ended with exit code {failure.exitcode} before its work was done; the job is ended."
