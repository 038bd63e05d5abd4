"""The distributions of sharding types, built and installed with pip, plan and train on real ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests import stranger
from tests.contrib import distributions, ranks

from shardwright_testing import RankPool

TYPES = {"round_robin": "round_robin", "hot_rows": "hot_rows", "hash_embedding": "hash_rows"}
"""Distribution -> its sharding type."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed them."""
    return distributions.install(TYPES, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pool(site: Path) -> Iterator[RankPool]:
    with RankPool(2, backend="gloo", initializer=functools.partial(ranks.find_plugins_in, str(site))) as made:
        yield made


def test_installed_distributions_are_listed_with_what_they_offer(site: Path) -> None:
    done = stranger.run_python("-m", "shardwright", "plugins", "--json", site=site)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    for name, kind in TYPES.items():
        project = distributions.project(name)
        assert rows[kind]["state"] == "loaded"
        assert (rows[kind]["distribution"], rows[kind]["version"]) == (project["name"], project["version"])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["round_robin", "hot_rows"])
def test_installed_type_planned_on_real_ranks_trains_like_one_process(pool: RankPool, name: str) -> None:
    (document, state), (_, other) = pool.run(ranks.train, 2, name)
    assert json.loads(document)["modules"][""]["item"]["sharding_type"] == name
    module = ranks.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=ranks.RATE)
    for step in range(ranks.STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (module(ranks.batch(step, rank)).values().sum() / 2).backward()
        optimizer.step()
    for key, weight in module.state_dict().items():
        torch.testing.assert_close(state[key], weight)
        assert torch.equal(state[key], other[key])


@pytest.mark.slow
@pytest.mark.distributed
def test_installed_hash_table_bears_the_rows_of_all_ids_on_real_ranks(pool: RankPool) -> None:
    pytest.importorskip("numba")  # the distribution depends on it, and is installed without its dependencies
    (document, state), _ = pool.run(ranks.train, 2, "hash_rows")
    assert json.loads(document)["modules"][""]["item"]["compute_kernel"] == "hash_table_numba"
    batches = [ranks.batch(step, rank).values() for step in range(ranks.STEPS) for rank in range(2)]
    ids, counts = torch.cat(batches).unique(return_counts=True)
    used = state["embedding_bags.item.row_uses"].squeeze(1)
    keys = state["embedding_bags.item.row_keys"].squeeze(1)
    found = sorted(zip(keys[used > 0].tolist(), used[used > 0].tolist(), strict=True))
    assert found == list(zip(ids.tolist(), counts.tolist(), strict=True))
