"""The kernels and row formats keep what the conformance kit asks."""

from __future__ import annotations

import pytest
from shardwright_serving import FORMATS
from shardwright_serving.plugin import shardwright_compute_kernels

import shardwright as sw
from shardwright_testing import RowFormatTests, ServingKernelTests


class TestRowFormats(RowFormatTests):
    @pytest.fixture(params=FORMATS)
    def row_format(self, request: pytest.FixtureRequest) -> sw.RowFormat:
        return FORMATS[request.param]


class TestServingKernels(ServingKernelTests):
    @pytest.fixture(params=shardwright_compute_kernels(), ids=lambda kernel: kernel.name)
    def compute_kernel(self, request: pytest.FixtureRequest) -> sw.ComputeKernel:
        kernel: sw.ComputeKernel = request.param()
        return kernel
