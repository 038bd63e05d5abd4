"""lmdb_caching keeps what every compute kernel must."""

from __future__ import annotations

import pytest
from shardwright_store import LmdbCaching

import shardwright as sw
from shardwright_testing import ComputeKernelTests

pytestmark = pytest.mark.usefixtures("plugins")


class TestLmdbCaching(ComputeKernelTests):
    @pytest.fixture
    def compute_kernel(self) -> sw.ComputeKernel:
        return LmdbCaching()
