"""The conformance kit: what every plugin must keep, as one class of tests a kind.

An author subclasses the class of their kind in a test module, and gives one pytest fixture, the object:

    class TestRoundRobin(ShardingTypeTests):
        @pytest.fixture
        def sharding_type(self):
            return RoundRobin()

Nothing of it needs a GPU or a cluster. Ranks are simulated in one process; only comm backends start real ones. It needs
pytest and Hypothesis (``pip install 'shardwright[testing]'``); what is drawn is the same in every run.
"""

from __future__ import annotations

import importlib
from typing import Any

from shardwright.hookspecs import KINDS

# The class of tests of each kind, and helpers for tests of one's own.
_MODULE_OF_NAME = {
    **{name: module for module, _, name in (kind.kit.rpartition(".") for kind in KINDS)},
    "RankError": "ranks",
    "RankPool": "ranks",
    "RowFormatTests": "row_formats",
    "RowIndexTests": "kernels.row_indexes",
    "ServingKernelTests": "serving_kernels",
    "SimulatedCommunicator": "simulated",
    "check_codec": "codecs",
    "installed": "plugins_under_test",
    "run_simulated": "simulated",
}

__all__ = sorted(_MODULE_OF_NAME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: pytest and Hypothesis are asked of those who test only."""
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
