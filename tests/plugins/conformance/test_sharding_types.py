"""Every registered sharding type keeps what the conformance kit asks."""

from __future__ import annotations

import pytest

from shardwright.contracts import ShardingType
from shardwright.plugins import host
from shardwright.testing import ShardingTypeTests


class TestShardingTypes(ShardingTypeTests):
    @pytest.fixture(params=sorted(host().sharding_types))
    def sharding_type(self, request: pytest.FixtureRequest) -> ShardingType:
        return host().sharding_types.create(request.param)
