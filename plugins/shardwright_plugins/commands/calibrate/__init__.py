"""`shardwright calibrate`: measures a machine, so that plans are made for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension


class Calibrate(Extension):
    """Measures kernels, exchanges and steps, and writes the machine's constants."""

    name = "command:calibrate"
    help = "Measure this machine, so that plans are made for it."

    def load(self) -> Callable[..., Any]:
        """The command `calibrate`."""
        from shardwright_plugins.commands.calibrate.command import calibrate

        return calibrate
