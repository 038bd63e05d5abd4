"""Every registered estimator keeps what the conformance kit asks."""

from __future__ import annotations

import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import Estimator
from shardwright.host import host
from shardwright_testing import EstimatorTests


class TestEstimators(EstimatorTests):
    @pytest.fixture(params=built_in("estimators"))
    def estimator(self, request: pytest.FixtureRequest) -> Estimator:
        return host().estimators.create(request.param)
