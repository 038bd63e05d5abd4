"""Makes every distribution of contrib importable in its tests, as if it were installed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from tests.contrib import distributions

from shardwright.host import PluginHost, use_host

# Their folders, not `contrib` itself: below that, folders bear the names of other people's packages.
sys.path[:0] = [str(distributions.ROOT / name) for name in distributions.NAMES]


@pytest.fixture(params=distributions.NAMES)
def distribution(request: pytest.FixtureRequest) -> str:
    """Each distribution's name."""
    return str(request.param)


@pytest.fixture
def entry_points(distribution: str) -> list[EntryPoint]:
    """Its plugins."""
    return distributions.entry_points(distribution)


@pytest.fixture
def plugins(request: pytest.FixtureRequest) -> Iterator[PluginHost]:
    """The one distribution whose folder a test is in, while the test runs."""
    name = request.path.parent.name
    with use_host(PluginHost(plugins={name: importlib.import_module(f"shardwright_{name}")})) as own:
        yield own


@pytest.fixture(scope="module")
def serving() -> Iterator[PluginHost]:
    """The plugin of quantized tables, in processes that tests start too, while a module's tests run."""
    from shardwright_serving import plugin

    paths = [str(distributions.ROOT / "serving"), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as changed, use_host(PluginHost(plugins={"serving": plugin})) as own:
        changed.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield own


@pytest.fixture(scope="module")
def scripting() -> Iterator[None]:
    """TorchScript and traces take sparse types and float collections, while a module's tests run."""
    from shardwright_serving.scripting import install, uninstall

    install()
    yield
    uninstall()
