"""Every registered compute kernel keeps what the conformance kit asks."""

from __future__ import annotations

import pytest

from shardwright.contracts import ComputeKernel
from shardwright.host import host
from shardwright.testing import ComputeKernelTests


class TestComputeKernels(ComputeKernelTests):
    @pytest.fixture(params=sorted(host().compute_kernels))
    def compute_kernel(self, request: pytest.FixtureRequest) -> ComputeKernel:
        return host().compute_kernels.create(request.param)
