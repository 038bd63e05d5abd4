"""Every registered codec keeps what the conformance kit asks."""

from __future__ import annotations

import pytest

from shardwright.contracts import Codec
from shardwright.host import host
from shardwright_testing import CodecTests


class TestCodecs(CodecTests):
    @pytest.fixture(params=sorted(host().codecs))
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return host().codecs.create(request.param)
