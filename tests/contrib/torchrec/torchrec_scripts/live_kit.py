"""The kit of estimators, for a Python in which TorchRec is installed and shardwright may not be."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from shardwright_torchrec.live import TorchRecLive, TorchRecLiveStorage

import shardwright as sw
from shardwright.hookspecs import KINDS
from shardwright_testing import EstimatorTests

BUILT_IN = [
    EntryPoint(f"builtin_{kind.label}", f"shardwright_plugins.{kind.label}", "shardwright")
    for kind in KINDS
    if kind.name != "extension"
]


@pytest.fixture(autouse=True)
def plugins() -> Iterator[None]:
    with sw.host.use_host(sw.host.PluginHost(entry_points=BUILT_IN)):
        yield


class TestLive(EstimatorTests):
    @pytest.fixture
    def estimator(self) -> sw.Estimator:
        return TorchRecLive()


class TestLiveStorage(EstimatorTests):
    @pytest.fixture
    def estimator(self) -> sw.Estimator:
        return TorchRecLiveStorage()
