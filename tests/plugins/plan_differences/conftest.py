"""Plans by little plugins of this process, as in the tests of planning."""

from tests.core.planning.conftest import host_with, little_plugins

__all__ = ["host_with", "little_plugins"]
