"""shardwright shards the embedding tables of recommender models; every part of it is a plugin.

The public names are imported on first use (PEP 562), because a planner must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from shardwright.host.process import provide

__version__ = "0.1.0"

# Public name -> the module that defines it. One line a name, sorted by module, then by name.
_MODULE_OF_NAME: dict[str, str] = {
    name: module
    for module, names in {
        "shardwright.errors": (
            "CheckpointError",
            "DistributedError",
            "DuplicateNameError",
            "IdRangeError",
            "InvalidInputError",
            "NameNotLoadedError",
            "NoPlanError",
            "PlanError",
            "PlanningError",
            "PluginLoadError",
            "PluginMismatchError",
            "ShardwrightError",
            "UnknownNameError",
            "UnknownPluginError",
            "UnsupportedError",
        ),
        "shardwright.contracts": (
            "NAMED_ONLY",
            "Arrivals",
            "Codec",
            "CommBackend",
            "CommType",
            "Communicator",
            "ComputeKernel",
            "EmbeddingComputeKernel",
            "Estimator",
            "Extension",
            "Finding",
            "KernelRequest",
            "KernelWork",
            "Offered",
            "Optimizer",
            "Partitioner",
            "Proposals",
            "Proposer",
            "RowFormat",
            "RowRule",
            "ShardingType",
            "Work",
        ),
        "shardwright.hookspecs": ("hookimpl",),
        "shardwright.modules.embedding_modules": (
            "EmbeddingBagCollection",
            "EmbeddingCollection",
        ),
        "shardwright.modules.table_collection": ("TableCollection",),
        "shardwright.optim": (
            "CombinedOptimizer",
            "KeyedOptimizer",
            "KeyedOptimizerWrapper",
            "OptimizerWrapper",
            "apply_optimizer_in_backward",
            "in_backward_optimizer_filter",
            "optimizer_spec_of",
            "register_fused_optimizer",
            "spec_to_torch",
        ),
        "shardwright.planning.tables.codecs": ("QCommsConfig",),
        "shardwright.planning.tables.caching": ("CacheParams", "CacheStatistics", "EmbeddingOffloadStats"),
        "shardwright.planning.tables.constraints": ("ParameterConstraints",),
        "shardwright.planning.documents": ("DocumentKind",),
        "shardwright.planning.layouts.layout": (
            "Block",
            "BlockRun",
            "ColumnRange",
            "Dataflow",
            "Exchange",
            "Layout",
            "Routed",
        ),
        "shardwright.planning.tables.optimizers": ("OptimizerSpec",),
        "shardwright.planning.tables.option_space": ("OptionSpace",),
        "shardwright.planning.options.options": ("Options", "Refusal"),
        "shardwright.planning.search.refinements": ("Outcome",),
        "shardwright.planning.search.loaded": ("Feedback", "LoadedPlan"),
        "shardwright.planning.search.placement": ("Misfit", "Placed", "ProposedShards", "Proven"),
        "shardwright.planning.plan.plan": ("ShardingPlan",),
        "shardwright.planning.plan.sharding": (
            "EmbeddingModuleShardingPlan",
            "EnumerableShardingSpec",
            "ParameterSharding",
            "ShardMetadata",
        ),
        "shardwright.runtime.sharded.models.planner": ("EmbeddingShardingPlanner",),
        "shardwright.planning.machines.reservations": ("StorageReservation",),
        "shardwright.planning.layouts.row_maps": (
            "RowMap",
            "RowPart",
            "RowsModulo",
            "RowsRange",
            "RowsSplit",
        ),
        "shardwright.planning.options.search_space": ("SearchSpace",),
        "shardwright.planning.tables.data_types": ("DataType",),
        "shardwright.planning.tables.spec": (
            "EmbeddingBagConfig",
            "EmbeddingConfig",
            "PoolingType",
            "TableSpec",
        ),
        "shardwright.planning.machines.replicas": ("Replicas",),
        "shardwright.planning.machines.topology": ("Topology",),
        "shardwright.planning.watch": ("Progress", "Watch"),
        "shardwright.planning.tables.workload": ("Workload",),
        "shardwright.runtime.step.awaitable": ("Awaitable", "LazyAwaitable"),
        "shardwright.runtime.ranks.environment": ("ShardingEnv",),
        "shardwright.contracts.lookup": ("Bags", "BlockSpec", "Lookup", "RowIndex"),
        "shardwright.runtime.sharded.models.model_parallel": ("DistributedModelParallel",),
        "shardwright.runtime.sharded.tables.data_parallel": ("DefaultDataParallelWrapper",),
        "shardwright.runtime.routed.direct": ("DirectReturn",),
        "shardwright.runtime.routed.plan": ("RoutingPlan",),
        "shardwright.runtime.routed.return_path": ("Answers", "PathSlots", "ReturnPath", "ReturnStep"),
        "shardwright.runtime.sharded.collections.sharders": (
            "EmbeddingBagCollectionSharder",
            "EmbeddingCollectionSharder",
            "LeaveAlone",
            "ModuleSharder",
            "ShardedEmbeddingBagCollection",
            "ShardedEmbeddingCollection",
        ),
        "shardwright.runtime.step.collection": ("Collection", "FeatureBatch"),
        "shardwright.runtime.step.columns": ("Columns",),
        "shardwright.runtime.step.kernel_groups": ("KernelGroup", "LookupBuilder"),
        "shardwright.runtime.step.executor": ("Executor", "ExecutorConfig", "ExecutorStep", "PeerHeaders"),
        "shardwright.sparse": ("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"),
    }.items()
    for name in names
}

# Public name -> the word of the extension at the point ``names`` that brings it.
_EXTENSION_OF_NAME: dict[str, str] = {
    name: word
    for word, names in {
        "checkpoints": (
            "LoadedCheckpoint",
            "PieceRequest",
            "SavedCheckpoint",
            "StoredCheckpoint",
            "StoredTensor",
            "load_checkpoint",
            "open_checkpoint",
            "save_checkpoint",
        ),
        "clipping": ("clip_grad_norm_",),
        "communicators": ("AllToAll", "CollectiveWatch", "TorchCommunicator", "Transport"),
        "comparisons": (
            "CheckedPlan",
            "ExplainedOption",
            "Explanation",
            "PlanDifference",
            "ReshardMoves",
            "TableChange",
            "TableMoves",
            "check_plan",
            "compare_plans",
            "explain_table",
        ),
        "optimizers": ("LazyAdam", "RowWiseAdagrad"),
        "pipelines": (
            "Backward",
            "CopyToDevice",
            "EvalPipelineSparseDist",
            "Evaluate",
            "ExchangeHeaders",
            "ExchangeIds",
            "Forward",
            "OptimizerStep",
            "PipelineStage",
            "PipelineStep",
            "Prefetch",
            "PrefetchTrainPipelineSparseDist",
            "StageAround",
            "TrainPipeline",
            "TrainPipelineBase",
            "TrainPipelineSparseDist",
            "ZeroGrad",
            "lockstep_batches",
        ),
    }.items()
    for name in names
}

__all__ = sorted([*_MODULE_OF_NAME, *_EXTENSION_OF_NAME, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def _plugin_host() -> Any:
    from shardwright.host.plugin_host import host

    return host()


provide(_plugin_host)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, and keep it."""
    if name == "host":
        return importlib.import_module("shardwright.host")
    if name in _EXTENSION_OF_NAME:
        value = _brought(name)
    elif name in _MODULE_OF_NAME:
        value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    else:
        from shardwright.errors import nearest

        # Dunder lookups come from the import machinery and from tools: they get no guesses.
        told = f"{nearest(name, __all__)} `shardwright docs from_torchrec` lists TorchRec's names."
        hint = "" if name.startswith("__") else told
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}.{hint}")
    globals()[name] = value
    return value


def _brought(name: str) -> Any:
    """A public name that a plugin brings."""
    from shardwright.errors import NameNotLoadedError, UnknownPluginError
    from shardwright.host.extensions import load_at

    word, extensions = _EXTENSION_OF_NAME[name], _plugin_host().extensions
    try:
        return load_at("names", word, extensions)(name)
    except UnknownPluginError as error:
        raise NameNotLoadedError(
            f"shardwright.{name} comes from a plugin that is not loaded: {error}"
        ) from error
    except (AttributeError, LookupError) as error:
        raise NameNotLoadedError(
            f"shardwright.{name} is not among the names that {f'names:{word}'!r} of plugin "
            f"{extensions.entry(f'names:{word}').provenance} brings: {type(error).__name__}: {error}"
        ) from error


def __dir__() -> list[str]:
    """The public names, whether imported yet or not."""
    return __all__
