"""The devices that tests of one device run on: the CPU, where their logic is shown, and a GPU where there is one."""

from __future__ import annotations

import pytest

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """Type of the device."""
    kind: str = request.param
    return kind


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), CUDA])
def each_device(request: pytest.FixtureRequest) -> str:
    """Type of the device, in tests of which there are many; on the CPU others show most of what they do."""
    kind: str = request.param
    return kind
