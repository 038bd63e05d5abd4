"""Every registered codec keeps what the conformance kit asks."""

from __future__ import annotations

import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import Codec
from shardwright.host import host
from shardwright_testing import CodecTests


class TestCodecs(CodecTests):
    @pytest.fixture(params=built_in("codecs"))
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return host().codecs.create(request.param)
