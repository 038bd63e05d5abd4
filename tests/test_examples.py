"""Examples in the docstrings of the names that users type first: each is there, and gives what it shows."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

import shardwright as sw

NAMES = (
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "ParameterConstraints",
    "Topology",
    "EmbeddingShardingPlanner",
    "EmbeddingShardingPlanner.collective_plan",
    "ShardingPlan",
    "OptimizerSpec",
    "ShardingEnv.local",
    "DistributedModelParallel",
    "TrainPipelineSparseDist",
    "apply_optimizer_in_backward",
    "CombinedOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "save_checkpoint",
    "load_checkpoint",
    "ShardingType",
    "Estimator",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "ShardingEnv",
    "ParameterSharding",
    "TableSpec",
    "Workload",
    "check_plan",
    "compare_plans",
    "explain_table",
    "in_backward_optimizer_filter",
    "QCommsConfig",
    "CacheParams",
    "OptionSpace",
    "EvalPipelineSparseDist",
    "RowsRange",
    "RowsModulo",
    "RowsSplit",
    "Layout",
    "Block",
    "open_checkpoint",
    "optimizer_spec_of",
    "spec_to_torch",
    "RowWiseAdagrad",
    "LazyAdam",
    "NoPlanError",
    "IdRangeError",
    "DataType",
    "PoolingType",
    "Replicas",
    "CheckedPlan",
    "PlanDifference",
    "Explanation",
    "ShardMetadata",
    "BlockRun",
    "ShardwrightError",
    "InvalidInputError",
    "UnknownPluginError",
    "CheckpointError",
    "PlanError",
    "StoredCheckpoint",
    "StoredTensor",
    "SavedCheckpoint",
    "LoadedCheckpoint",
    "PrefetchTrainPipelineSparseDist",
    "Progress",
)


def examples(name):
    """Examples of a public name, or of a module."""
    found = importlib.import_module(name) if name.startswith("shardwright") else sw
    for word in [] if name.startswith("shardwright") else name.split("."):
        found = getattr(found, word)
    finder = doctest.DocTestFinder(recurse=False)
    return [test for test in finder.find(found, name, extraglobs={"torch": torch}) if test.examples]


# `hookimpl` is pluggy's object: its example stands in the docstring of the module that lists the hooks.
@pytest.mark.parametrize("name", [*NAMES, "shardwright.hookspecs", "shardwright_plugins.dataflows"])
def test_docstring_has_an_example_that_gives_what_it_shows(name):
    (test,) = examples(name)
    assert not any(example.options.get(doctest.SKIP) for example in test.examples)
    told = []
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append).failed == 0, (
        "".join(told)
    )
