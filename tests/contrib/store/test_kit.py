"""lmdb_caching keeps what every compute kernel must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import shardwright_store
from shardwright_store import LmdbCaching

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright_testing import ComputeKernelTests


@pytest.fixture(autouse=True)
def plugins() -> Iterator[PluginHost]:
    with use_host(PluginHost(plugins={"store": shardwright_store})) as own:
        yield own


class TestLmdbCaching(ComputeKernelTests):
    @pytest.fixture
    def compute_kernel(self) -> sw.ComputeKernel:
        return LmdbCaching()
