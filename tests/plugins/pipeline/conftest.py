"""The kernels that are loops, and pipelines: no other plugin, as in the tests of core's engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.core.runtime.plans import host_with_loops

import shardwright_plugins.pipeline
from shardwright.host import PluginHost, use_host


@pytest.fixture(autouse=True)
def only_loops() -> Iterator[PluginHost]:
    """No plugin but these."""
    with use_host(host_with_loops(pipeline=shardwright_plugins.pipeline)) as replaced:
        yield replaced
