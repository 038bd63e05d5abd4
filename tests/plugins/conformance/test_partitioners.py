"""Every registered partitioner keeps what the conformance kit asks."""

from __future__ import annotations

import pytest

from shardwright.contracts import Partitioner
from shardwright.plugins import host
from shardwright.testing import PartitionerTests


class TestPartitioners(PartitionerTests):
    @pytest.fixture(params=sorted(host().partitioners))
    def partitioner(self, request: pytest.FixtureRequest) -> Partitioner:
        return host().partitioners.create(request.param)
