"""Every registered compute kernel keeps what the conformance kit asks."""

from __future__ import annotations

import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import ComputeKernel
from shardwright.host import host
from shardwright_testing import ComputeKernelTests


class TestComputeKernels(ComputeKernelTests):
    @pytest.fixture(params=built_in("compute_kernels"))
    def compute_kernel(self, request: pytest.FixtureRequest) -> ComputeKernel:
        return host().compute_kernels.create(request.param)
