"""Every registered proposer keeps what the conformance kit asks."""

from __future__ import annotations

import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import Proposer
from shardwright.host import host
from shardwright_testing import ProposerTests


class TestProposers(ProposerTests):
    @pytest.fixture(params=built_in("proposers"))
    def proposer(self, request: pytest.FixtureRequest) -> Proposer:
        return host().proposers.create(request.param)
