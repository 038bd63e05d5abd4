"""The warning for restarts whose ranks may not connect."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright_plugins.guards._restarts import warn_of_restarts
from shardwright_testing.simulated import run_simulated

TABLE = sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])


def build(env: sw.ShardingEnv) -> None:
    sw.DistributedModelParallel(sw.EmbeddingBagCollection([TABLE], device="meta"), env=env)


@pytest.mark.parametrize(
    ("restarts", "shares", "num_warnings"),
    [("3", "True", 1), ("3", "False", 0), ("0", "True", 0), (None, None, 0)],
)
def test_restarts_through_a_store_that_attempts_share_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    restarts: str | None,
    shares: str | None,
    num_warnings: int,
) -> None:
    for name, value in (("TORCHELASTIC_MAX_RESTARTS", restarts), ("TORCHELASTIC_USE_AGENT_STORE", shares)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    warn_of_restarts.cache_clear()
    for _ in range(2):
        run_simulated(build, 2)
    assert [record.args for record in caplog.records] == [(restarts,)] * num_warnings
