from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.core.runtime.plans import host_with_loops

from shardwright.host import PluginHost, use_host


@pytest.fixture(autouse=True)
def only_loops() -> Iterator[PluginHost]:
    """No plugin but the kernels that are loops."""
    with use_host(host_with_loops()) as replaced:
        yield replaced
