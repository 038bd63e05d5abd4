"""Every registered proposer keeps what the conformance kit asks."""

from __future__ import annotations

import pytest

from shardwright.contracts import Proposer
from shardwright.host import host
from shardwright_testing import ProposerTests


class TestProposers(ProposerTests):
    @pytest.fixture(params=sorted(host().proposers))
    def proposer(self, request: pytest.FixtureRequest) -> Proposer:
        return host().proposers.create(request.param)
