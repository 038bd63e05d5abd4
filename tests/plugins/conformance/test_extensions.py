"""Every registered extension keeps what the conformance kit asks."""

from __future__ import annotations

import pytest

from shardwright.contracts import Extension
from shardwright.host import host
from shardwright_testing import ExtensionTests


class TestExtensions(ExtensionTests):
    @pytest.fixture(params=sorted(host().extensions))
    def extension(self, request: pytest.FixtureRequest) -> Extension:
        return host().extensions.create(request.param)
