"""The sides of a comparison: our ranks, and another program with the same options."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from shardwright.errors import DistributedError, InvalidInputError

if TYPE_CHECKING:
    from shardwright_plugins.commands.bench.step import StepSettings
    from shardwright_testing.ranks import RankPool

TIMEOUT_S = 600.0


@frozen
class Figures:
    """Measurements of one run of one side.

    Args:
        min_ms: the fastest step.
        median_ms: the median step.
        collectives: collectives of one step, forward and backward; ``None`` where the side does not count them.
    """

    min_ms: float
    median_ms: float
    collectives: int | None = None


class Side(ABC):
    """Something that times a step.

    Attributes:
        name: name of the side, in tables and JSON.
    """

    name: str

    @abstractmethod
    def measure(self, settings: StepSettings) -> Figures:
        """Time one round in fresh processes.

        Raises:
            ShardwrightError: it failed; says why.
        """

    def close(self) -> None:  # noqa: B027 - most sides keep nothing
        """End what was kept between measurements."""


@define(eq=False)
class Ranks(Side):
    """The installed shardwright, one process a rank.

    Args:
        is_kept: the processes are used again by the next measurement; beside another program, which starts anew
            each time, each has its own.
    """

    is_kept: bool = False
    name: str = field(default="shardwright", init=False)
    _pool: RankPool | None = field(default=None, init=False)

    def measure(self, settings: StepSettings) -> Figures:  # noqa: D102 - described in the base class
        from shardwright.host import host
        from shardwright_plugins.commands.bench.step import check_devices, time_step

        for name in settings.types:
            host().sharding_types.canonical(name)  # an unknown name costs no processes
        check_devices(settings)
        try:
            pool = self._pool_of(settings.ranks, settings.device)
            results = pool.run(time_step, settings.ranks, settings, timeout_s=TIMEOUT_S)
        finally:
            if not self.is_kept:
                self.close()
        return Figures(**results[0])

    def _pool_of(self, ranks: int, device: str) -> RankPool:
        from shardwright.host import host
        from shardwright_testing.ranks import RankPool

        if self._pool is None:
            backends = host().comm_backends.entries.items()
            backend = next((name for name, entry in backends if device in entry.item.devices), None)
            if backend is None:
                raise DistributedError(
                    f"no comm backend serves the device {device!r}: see `shardwright plugins`"
                )
            self._pool = RankPool(ranks, backend=backend, initializer=_leave_interrupts_to_the_parent)
        return self._pool

    def close(self) -> None:  # noqa: D102
        if self._pool is not None:
            self._pool.close()
        self._pool = None


@frozen
class Program(Side):
    """Another program, called with the options of ``bench step``; its last line is JSON.

    Args:
        command: command line, as in a shell.
        name: name of the side.
    """

    command: str
    name: str = "beside"

    def measure(self, settings: StepSettings) -> Figures:  # noqa: D102 - described in the base class
        words = [*shlex.split(self.command), *settings.options()]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InvalidInputError(f"{self.command!r} did not run: {error}") from error
        lines = done.stdout.strip().splitlines()
        try:
            return _figures(json.loads(lines[-1]))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            told = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise InvalidInputError(
                f"{self.command!r} ended with exit code {done.returncode} and no JSON with min_ms and median_ms; "
                f"it said: {told}"
            ) from error


def _figures(told: Mapping[str, Any]) -> Figures:
    return Figures(float(told["min_ms"]), float(told["median_ms"]), told.get("collectives"))


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches every process of the terminal; the parent ends its ranks, which need not say so too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
