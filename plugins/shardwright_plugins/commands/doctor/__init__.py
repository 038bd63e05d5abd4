"""`shardwright doctor`: what is installed, whether it works together, and what would mend it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension


class Doctor(Extension):
    """Tells what the checks of all plugins find."""

    name = "command:doctor"
    help = "Tell what is installed, whether it works together, and what would mend it."

    def load(self) -> Callable[..., Any]:
        """The command `doctor`."""
        from shardwright_plugins.commands.doctor.command import doctor

        return doctor


class Python(Extension):
    """Looks at Python, shardwright and torch."""

    name = "check:python"
    help = "Python, shardwright and torch."

    def load(self) -> Callable[..., Any]:
        """The function that looks."""
        from shardwright_plugins.commands.doctor.checks import python

        return python


class Devices(Extension):
    """Looks at the processor, the accelerators, their memory and bandwidths."""

    name = "check:devices"
    help = "Processor, accelerators, memory and bandwidths."

    def load(self) -> Callable[..., Any]:
        """The function that looks."""
        from shardwright_plugins.commands.doctor.checks import devices

        return devices


class Plugins(Extension):
    """Looks at the plugins that are installed."""

    name = "check:plugins"
    help = "Plugins that are installed, off, or failed."

    def load(self) -> Callable[..., Any]:
        """The function that looks."""
        from shardwright_plugins.commands.doctor.checks import plugins

        return plugins


class Environment(Extension):
    """Looks at environment variables."""

    name = "check:environment"
    help = "Environment variables that shardwright and its libraries read."

    def load(self) -> Callable[..., Any]:
        """The function that looks."""
        from shardwright_plugins.commands.doctor.checks import environment

        return environment
