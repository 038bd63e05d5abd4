"""Every registered extension keeps what the conformance kit asks."""

from __future__ import annotations

import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import Extension
from shardwright.host import host
from shardwright_testing import ExtensionTests


class TestExtensions(ExtensionTests):
    @pytest.fixture(params=built_in("extensions"))
    def extension(self, request: pytest.FixtureRequest) -> Extension:
        return host().extensions.create(request.param)
