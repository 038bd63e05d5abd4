"""The plugin of quantised tables, as if it were installed, in processes that tests start too."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from shardwright_serving import plugin
from tests.contrib import distributions

from shardwright.host import PluginHost, use_host


@pytest.fixture(autouse=True, scope="module")
def serving() -> Iterator[PluginHost]:
    paths = [str(distributions.ROOT / "serving"), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as changed, use_host(PluginHost(plugins={"serving": plugin})) as own:
        changed.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield own
