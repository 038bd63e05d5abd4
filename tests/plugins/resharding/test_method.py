"""``model.reshard`` is what a plugin brings."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import shardwright as sw
from shardwright.contracts.extension import Resharded
from shardwright.host import PluginHost, use_host


def model_and_other_plan() -> tuple[sw.DistributedModelParallel, sw.ShardingPlan]:
    table = sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])
    env = sw.ShardingEnv.local(device_type="cpu")
    model = sw.DistributedModelParallel(sw.EmbeddingBagCollection([table], device="meta"), env=env)
    planner = sw.EmbeddingShardingPlanner(
        constraints={"item": sw.ParameterConstraints(sharding_types=["row_wise"])}
    )
    return model, planner.collective_plan(model, env=env)


class Recorded(sw.Extension):
    name = "method:reshard"
    asked: list[Any] = []

    def load(self) -> Callable[..., Any]:
        def reshard(*args: Any, **limits: Any) -> Resharded:
            self.asked.append((args, limits))
            return Resharded(("item",))

        return reshard


def test_reshard_is_what_a_plugin_brings() -> None:
    @sw.hookimpl
    def shardwright_extensions() -> list[type[sw.Extension]]:
        return [Recorded]

    model, plan = model_and_other_plan()
    plugin = SimpleNamespace(shardwright_extensions=shardwright_extensions)
    with use_host(
        PluginHost(plugins={"other": plugin}, environment={"SHARDWRIGHT_PLUGINS": "-builtin_resharding"})
    ):
        assert model.reshard(plan, piece_bytes=7) == Resharded(("item",))
    (((asked, to, optimizers), limits),) = Recorded.asked
    assert (asked, to, optimizers) == (model, plan, ())
    assert limits == {"max_extra_bytes": None, "piece_bytes": 7}
    assert model.plan is plan


def test_reshard_to_what_is_no_plan_is_refused() -> None:
    model, _ = model_and_other_plan()
    before = model.plan
    with pytest.raises(sw.InvalidInputError, match="plan must be a ShardingPlan, got None"):
        model.reshard(None)  # type: ignore[arg-type]
    assert model.plan is before


def test_reshard_without_a_plugin_is_refused() -> None:
    model, plan = model_and_other_plan()
    before = model.plan
    environment = {"SHARDWRIGHT_PLUGINS": "-builtin_resharding"}
    with use_host(PluginHost(environment=environment)), pytest.raises(sw.UnknownPluginError):
        model.reshard(plan)
    assert model.plan is before
