"""Every registered partitioner keeps what the conformance kit asks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import Partitioner
from shardwright.host import host
from shardwright_testing import PartitionerTests


def _params() -> list[Any]:
    """Each partitioner; those with the patience of a last resort are tested apart."""
    last = [name for name in built_in("partitioners") if host().partitioners.create(name).is_last_resort]
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name in last else [])
        for name in built_in("partitioners")
    ]


class TestPartitioners(PartitionerTests):
    @pytest.fixture(params=_params())
    def partitioner(self, request: pytest.FixtureRequest) -> Partitioner:
        return host().partitioners.create(request.param)
