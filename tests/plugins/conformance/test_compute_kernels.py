"""Every registered compute kernel keeps what the conformance kit asks."""

from __future__ import annotations

import pytest
from tests.plugins.compute_kernels.loops import built_in_kernels

from shardwright.contracts import ComputeKernel
from shardwright.host import host
from shardwright_testing import ComputeKernelTests


class TestComputeKernels(ComputeKernelTests):
    @pytest.fixture(params=built_in_kernels())
    def compute_kernel(self, request: pytest.FixtureRequest) -> ComputeKernel:
        return host().compute_kernels.create(request.param)
