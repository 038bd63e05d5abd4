"""hash_table and hash_rows keep what every kernel and every sharding type must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import shardwright_hash_embedding
from shardwright_hash_embedding import HashRows, HashSettings, HashTable

import shardwright as sw
from shardwright.plugins import PluginHost, use_host
from shardwright.testing import ComputeKernelTests, ShardingTypeTests


@pytest.fixture(autouse=True)
def plugins() -> Iterator[PluginHost]:
    with use_host(PluginHost(plugins={"hash_embedding": shardwright_hash_embedding})) as own:
        yield own


class TestHashTable(ComputeKernelTests):
    extras = HashSettings(
        min_sightings=2
    ).to_extras()  # the memory that is planned with is that of ids on trial

    @pytest.fixture
    def compute_kernel(self) -> sw.ComputeKernel:
        return HashTable()


class TestHashRows(ShardingTypeTests):
    constraints = HashSettings().constraints()

    @pytest.fixture
    def sharding_type(self) -> sw.ShardingType:
        return HashRows()
