"""Every registered compute kernel keeps what the conformance kit asks."""

from __future__ import annotations

import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import ComputeKernel
from shardwright.host import host
from shardwright_testing import ComputeKernelTests, ServingKernelTests


def names(*, trains: bool) -> list[str]:
    kernels = host().compute_kernels
    return [name for name in built_in("compute_kernels") if kernels[name].trains is trains]


class TestComputeKernels(ComputeKernelTests):
    @pytest.fixture(params=names(trains=True))
    def compute_kernel(self, request: pytest.FixtureRequest) -> ComputeKernel:
        return host().compute_kernels.create(request.param)


class TestServingKernels(ServingKernelTests):
    @pytest.fixture(params=names(trains=False))
    def compute_kernel(self, request: pytest.FixtureRequest) -> ComputeKernel:
        return host().compute_kernels.create(request.param)
