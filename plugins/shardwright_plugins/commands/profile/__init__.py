"""`shardwright profile`: constraints for planning from a sample of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension


class ProfileData(Extension):
    """Measures ids per bag and the behaviour of caches on a sample of the data."""

    name = "command:profile"
    help = "Measure ids per bag and caches' hit rates on Parquet files, as constraints for plan."

    def load(self) -> Callable[..., Any]:
        """The command `profile`."""
        from shardwright_plugins.commands.profile.command import profile

        return profile
