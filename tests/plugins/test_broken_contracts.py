"""A plugin that breaks its contract while planning or building is told so by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shardwright as sw
from shardwright.testing import installed, run_simulated

TABLE = sw.TableSpec("user", 100, 16, ["u"])


def plan(estimator: Any = None, **rules: Any) -> sw.ShardingPlan:
    topology = sw.Topology(world_size=1, compute_device="cpu")
    constraints = {"*": sw.ParameterConstraints(**rules)}
    planner = sw.EmbeddingShardingPlanner(topology, 8, estimator=estimator, constraints=constraints)
    return planner.plan_tables([TABLE])


class GivesBlocks(sw.ShardingType):
    name, abbreviation = "gives_blocks", "GB"

    def layouts(self, table: Any, topology: Any, constraints: Any) -> Any:
        yield sw.Block(table.all_rows, table.all_columns)


class GivesAColumn(sw.Estimator):
    name = "gives_a_column"

    def estimate(self, options: Any, topology: Any) -> Any:
        return np.zeros(options.num_shards)


class BuildsNothing(sw.ComputeKernel):
    name = "builds_nothing"
    answer: Any = True

    def supports(self, request: Any) -> Any:
        return self.answer

    def memory_bytes(self, request: Any, num_rows: int) -> Any:
        return {"device": 5}

    def build(self, blocks: Any, *, device: Any) -> Any:
        return None


class SaysFalse(BuildsNothing):
    name, answer = "says_false", False


def test_sharding_type_that_gives_no_layouts_is_named() -> None:
    text = r"'gives_blocks' failed for table 'user' .*: layouts\(\) must give Layouts, it gave a Block"
    with installed(GivesBlocks()), pytest.raises(sw.PlanningError, match=text):
        plan(sharding_types=["gives_blocks"])


def test_estimator_that_gives_no_mapping_is_named() -> None:
    text = r"'gives_a_column' broke its contract: estimate\(\) returned a ndarray; .* from each phase"
    with pytest.raises(sw.PlanningError, match=text):
        plan(estimator=GivesAColumn())


def test_kernel_that_gives_no_reason_is_told_so() -> None:
    text = r"compute kernel 'says_false': supports\(\) returned False; it must be True, or a text"
    with installed(SaysFalse()), pytest.raises(sw.PlanningError, match=text):
        plan(compute_kernels=["says_false"])


def test_kernel_that_builds_no_lookup_is_named_with_the_tables() -> None:
    config = sw.EmbeddingBagConfig(name="user", num_embeddings=100, embedding_dim=16, feature_names=["u"])
    module, sharder = sw.EmbeddingBagCollection([config]), sw.EmbeddingBagCollectionSharder()
    torch.set_num_threads(1)
    with installed(BuildsNothing()):
        made = plan(compute_kernels=["builds_nothing"])
        text = r"'builds_nothing' broke its contract: build\(\) for the tables 'user' returned a NoneType"
        with pytest.raises(sw.UnsupportedError, match=text):
            run_simulated(lambda env: sharder.shard(module, made.plan[""], env, "cpu"), 1)
