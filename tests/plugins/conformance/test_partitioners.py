"""Every registered partitioner keeps what the conformance kit asks."""

from __future__ import annotations

import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import Partitioner
from shardwright.host import host
from shardwright_testing import PartitionerTests


class TestPartitioners(PartitionerTests):
    @pytest.fixture(params=built_in("partitioners"))
    def partitioner(self, request: pytest.FixtureRequest) -> Partitioner:
        return host().partitioners.create(request.param)
