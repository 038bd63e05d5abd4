"""The distributions of sharding types, built and installed with pip, are found with what they offer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import stranger
from tests.contrib import distributions

TYPES = {"round_robin": "round_robin", "hot_rows": "hot_rows", "hash_embedding": "hash_rows"}
"""Distribution -> its sharding type."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed them."""
    return distributions.install(TYPES, tmp_path_factory.mktemp("site"))


def test_installed_distributions_are_listed_with_what_they_offer(site: Path) -> None:
    done = stranger.run_python("-m", "shardwright", "plugins", "--json", site=site)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    for name, kind in TYPES.items():
        project = distributions.project(name)
        assert rows[kind]["state"] == "loaded"
        assert (rows[kind]["distribution"], rows[kind]["version"]) == (project["name"], project["version"])
