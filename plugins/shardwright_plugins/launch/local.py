"""Start of ranks on this machine from a script or a notebook, through torch's own process contexts."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    ProcessFailure,
    SignalException,
    start_processes,
)

from shardwright.arguments import PositiveFloat, PositiveInt, brief, checked
from shardwright.errors import DistributedError, InvalidInputError

_BETWEEN_LOOKS_S = 0.1
"""Time between two looks at the ranks' processes, s."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torch turns into a `SignalException` while it has processes."""


@checked
def launch(
    function: Callable[..., Any], *args: Any, ranks: PositiveInt, timeout_s: PositiveFloat | None = None
) -> list[Any]:
    """Call a function in local processes, one a rank, and return what it returns on each.

    Each process has the environment that ``torchrun`` gives, so that the function may begin with
    ``torch.distributed.init_process_group()``. Function and arguments are sent by value with what they use of the
    script or notebook, which is not run again: it needs no ``if __name__ == "__main__"``.
    A process ends when the function has returned, without handlers of ``atexit``, as those of ``multiprocessing`` do.

    Args:
        function: called as ``function(*args)``; may be defined in a script or in a cell of a notebook.
        args: its arguments; pickled.
        ranks: number of processes, at least 1.
        timeout_s: longest time that the ranks may take, s; by default as long as they need.

    Returns:
        The results in rank order; pickled.

    Raises:
        InvalidInputError: ``ranks`` is below 1, ``timeout_s`` is not above 0, or the function or an argument cannot be
            pickled.
        DistributedError: the function failed on a rank, a rank's process died, or time is up. The text has the
            traceback of each rank that failed, the first one first. All processes are ended.
        KeyboardInterrupt: the user interrupted. All processes are ended.

    Example:
        >>> from shardwright_plugins.launch import launch
        >>> def rank():
        ...     torch.distributed.init_process_group("gloo")
        ...     return torch.distributed.get_rank()
        >>> launch(rank, ranks=2)  # doctest: +SKIP
        [0, 1]
    """
    with _signals_handed_back(), tempfile.TemporaryDirectory(prefix="shardwright-launch-") as folder:
        Path(folder, "call").write_bytes(_pickled(function, args))
        if failures := _run(folder, ranks, timeout_s):
            raise DistributedError(_text_of(failures, ranks))
        results = [Path(folder, f"result_{rank}") for rank in range(ranks)]
        if gone := [rank for rank, result in enumerate(results) if not result.exists()]:
            raise DistributedError(
                f"launch: the function ended the process of ranks {gone} before it returned"
            )
        return [pickle.loads(result.read_bytes()) for result in results]


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return cloudpickle.dumps((function, args))
    except Exception as error:  # whatever an object's own pickling raises
        raise InvalidInputError(
            f"launch: {brief(function)} and its arguments cannot be sent to other processes: {error}. A function "
            "is sent with the variables that it uses: make what cannot be sent inside it"
        ) from error


def _run(folder: str, ranks: int, timeout_s: float | None) -> Mapping[int, ProcessFailure]:
    """Run the call that is in a folder on all ranks; return those that failed.

    Raises:
        DistributedError: time is up.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # for as long as the ranks run
    words = ("-P", "-m", "shardwright_plugins.launch.rank", folder, str(os.getpid()))
    processes = start_processes(
        "rank",
        sys.executable,
        dict.fromkeys(range(ranks), words),
        {rank: _environment(rank, ranks, store.port) for rank in range(ranks)},
        DefaultLogsSpecs(folder),
    )
    try:
        result = processes.wait(-1 if timeout_s is None else timeout_s, _BETWEEN_LOOKS_S)
    finally:
        processes.close()
    if result is None:
        raise DistributedError(
            f"launch: the {ranks} ranks did not end within timeout_s={timeout_s:g} and were ended"
        )
    return result.failures


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Variables of a rank, as ``torchrun`` sets them; modules are found where this process finds them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


@contextmanager
def _signals_handed_back() -> Iterator[None]:
    """Give signals back their handlers, which torch replaces, and keep torch from logging what is raised anyway."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if in_main_thread else {}
    logger.disabled = True
    try:
        try:
            yield
        finally:
            logger.disabled = False
            for number, handler in handlers.items():
                signal.signal(number, handler)
    except SignalException as error:
        signal.raise_signal(error.sigval)  # to the handler that it was meant for
        raise


def _text_of(failures: Mapping[int, ProcessFailure], ranks: int) -> str:
    """Text of the error for ranks that failed or died; not for those that were ended because of them."""
    in_order = sorted(failures.values(), key=_time)
    causes = [failure for failure in in_order if _time(failure) or failure.exitcode != -signal.SIGTERM]
    return "\n".join(_of_rank(failure, ranks) for failure in causes or in_order)


def _time(failure: ProcessFailure) -> float:
    """Time of a failure; 0 of a process that died, from which others suffer."""
    return os.path.getmtime(failure.error_file) if os.path.exists(failure.error_file) else 0.0


def _of_rank(failure: ProcessFailure, ranks: int) -> str:
    who = f"rank {failure.local_rank} of {ranks} (process {failure.pid})"
    message: Any = failure.message  # a text, or what the rank's error file holds
    if isinstance(message, dict):
        return f"{who} failed:\n{message['extraInfo']['py_callstack'].rstrip()}"
    if failure.exitcode < 0:
        return f"{who} was killed by signal {-failure.exitcode} ({failure.signal_name()}); the job is ended"
    return f"{who} ended with exit code {failure.exitcode} before its work was done; the job is ended"
