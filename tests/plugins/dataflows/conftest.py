"""The kernels that are loops, and no other plugin, as in the tests of core's engine."""

from tests.core.runtime.conftest import only_loops

__all__ = ["only_loops"]
