"""Every registered comm backend keeps what the conformance kit asks."""

from __future__ import annotations

import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import CommBackend
from shardwright.host import host
from shardwright_testing import CommBackendTests

pytestmark = pytest.mark.distributed


class TestCommBackends(CommBackendTests):
    @pytest.fixture(params=built_in("comm_backends"))
    def comm_backend(self, request: pytest.FixtureRequest) -> CommBackend:
        return host().comm_backends.create(request.param)
