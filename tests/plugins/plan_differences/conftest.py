"""Plans by little plugins of this process, as in the tests of planning."""

from tests.core.planning.conftest import little_plugins

__all__ = ["little_plugins"]
