"""The built-in commands beside those of core. Thin: what a command needs is imported when it runs."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.commands.bench import Bench
from shardwright_plugins.commands.calibrate import Calibrate
from shardwright_plugins.commands.checkpoint import Checkpoint
from shardwright_plugins.commands.demo import Demo
from shardwright_plugins.commands.doctor import Devices, Doctor, Environment, Plugins, Python
from shardwright_plugins.commands.new_plugin import NewPlugin
from shardwright_plugins.commands.pages import Docs
from shardwright_plugins.commands.plans import Diff, Explain
from shardwright_plugins.commands.profile import ProfileData


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the built-in commands."""
    return [
        Bench,
        Calibrate,
        Checkpoint,
        Demo,
        Devices,
        Diff,
        Docs,
        Doctor,
        Environment,
        Explain,
        NewPlugin,
        Plugins,
        ProfileData,
        Python,
    ]
