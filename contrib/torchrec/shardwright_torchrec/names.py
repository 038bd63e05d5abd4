"""`import torchrec` gives shardwright: TorchRec's module paths, served by an import hook.

A finder answers for `torchrec` and what is below it, and its modules look each name up in `shardwright` when it is
asked for, or in this package: quantized tables, and what is bent to TorchRec's ways. Once a
script imports one of the types, TorchScript and `torch.fx` take them.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import shardwright
from shardwright_torchrec._waiting import ROOT, VARIABLE, Waiting

__all__ = [
    "ADAPTED",
    "MODULES",
    "PATHS",
    "QUANTIZED",
    "find",
    "find_spec",
    "install",
    "is_installed",
    "uninstall",
]

_CONFIGS = ("DataType", "PoolingType")
_COLLECTIONS = ("EmbeddingBagCollection", "EmbeddingCollection")
_SPARSE = ("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor")
_GROUPS = ("DefaultDataParallelWrapper",)
_LOOPS = ("EvalPipelineSparseDist", "PrefetchTrainPipelineSparseDist")
_SCRIPTED = frozenset((*_COLLECTIONS, *_SPARSE))
_SCRIPTING = "shardwright_serving.scripting"
_PLANS = ("EmbeddingModuleShardingPlan", "ParameterSharding", "ShardMetadata", "ShardingPlan")
_APPLY = ("apply_optimizer_in_backward",)
_KEYED = ("CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")

MODULES: Mapping[str, Sequence[str]] = {
    "torchrec": (*_CONFIGS, *_COLLECTIONS, *_SPARSE),
    "torchrec.distributed": (
        *("Awaitable", "ModuleSharder", "ParameterSharding", "ShardingEnv"),
        *_LOOPS,
    ),
    "torchrec.distributed.embedding": ("ShardedEmbeddingCollection",),
    "torchrec.distributed.embedding_types": ("ModuleSharder", "ShardingType"),
    "torchrec.distributed.embeddingbag": ("ShardedEmbeddingBagCollection",),
    "torchrec.distributed.model_parallel": _GROUPS,
    "torchrec.distributed.fbgemm_qcomm_codec": ("CommType", "QCommsConfig"),
    "torchrec.distributed.planner.shard_estimators": ("EmbeddingOffloadStats",),
    "torchrec.distributed.planner.types": ("ShardingPlan", "StorageReservation"),
    "torchrec.distributed.train_pipeline": (*_LOOPS, "TrainPipeline"),
    "torchrec.distributed.train_pipeline.train_pipelines": (*_LOOPS, "TrainPipeline"),
    "torchrec.distributed.types": (
        *("Awaitable", "CacheStatistics", "LazyAwaitable", "ModuleSharder"),
        *("DataType", "EnumerableShardingSpec", "ShardingEnv", "ShardingType", *_PLANS),
    ),
    "torchrec.modules": (),
    "torchrec.modules.embedding_configs": _CONFIGS,
    "torchrec.modules.embedding_modules": _COLLECTIONS,
    "torchrec.optim": (*_APPLY, *_KEYED),
    "torchrec.optim.apply_optimizer_in_backward": _APPLY,
    "torchrec.optim.keyed": _KEYED,
    "torchrec.optim.optimizers": ("in_backward_optimizer_filter",),
    "torchrec.sparse": (),
    "torchrec.sparse.jagged_tensor": _SPARSE,
    "torchrec.types": ("DataType",),
}
"""TorchRec 1.8's module paths -> the names of theirs that shardwright has."""

_QUANT = {
    "EmbeddingBagCollection": "QuantEmbeddingBagCollection",
    "EmbeddingCollection": "QuantEmbeddingCollection",
}
_TRACING = {"Tracer": "Tracer", "symbolic_trace": "symbolic_trace"}

QUANTIZED: Mapping[str, Mapping[str, str]] = {
    "torchrec.distributed.quant_embedding": {
        "QuantEmbeddingCollectionSharder": "QuantEmbeddingCollectionSharder",
        "ShardedQuantEmbeddingCollection": "QuantEmbeddingCollection",
    },
    "torchrec.distributed.quant_embeddingbag": {
        "QuantEmbeddingBagCollectionSharder": "QuantEmbeddingBagCollectionSharder",
        "ShardedQuantEmbeddingBagCollection": "QuantEmbeddingBagCollection",
    },
    "torchrec.distributed.shard": {"_shard_modules": "shard_modules", "shard_modules": "shard_modules"},
    "torchrec.fx": _TRACING,
    "torchrec.fx.tracer": _TRACING,
    "torchrec.inference": {},
    "torchrec.inference.modules": {
        name: name for name in ("quantize_embeddings", "quantize_inference_model", "shard_quant_model")
    },
    "torchrec.modules.embedding_configs": {"QuantConfig": "QuantConfig"},
    "torchrec.quant": {"EmbeddingBagCollection": "QuantEmbeddingBagCollection"},
    "torchrec.quant.embedding_modules": _QUANT,
}
"""TorchRec's module paths -> names of theirs -> what `shardwright_torchrec.quant` calls them."""

_MODEL, _SHARDERS, _PLANNERS = "parallel.model_parallel", "parallel.sharders", "planner.planners"

_ENUMERATORS, _PARTITIONERS = "planner.enumerators", "planner.partitioners"
_PROPOSERS, _ESTIMATORS, _STATS = "planner.proposers", "planner.shard_estimators", "planner.stats"
_TABLES = "modules.configs"
_PROCESSORS = "modules.feature_processors"
_TOPOLOGIES, _CONSTRAINTS = "planner.topologies", "parallel.constraints"
_JAGGED = "sparse.jagged_tensors"
_INTERFACES = "distributed.interfaces"
_OPTIMIZERS = "optim.optimizers"
_OF_FBGEMM = ("LAMB", "SGD", "Adagrad", "Adam", "LarsSGD", "PartialRowWiseAdam", "PartialRowWiseLAMB")
_MAPPED, _MAPS = "modules.managed_collisions.embedding", "modules.managed_collisions.maps"
_POLICIES = "modules.managed_collisions.policies"
_METRICS = "metrics.computations"
_PLANNER_TYPES, _UTILS, _RESERVED = "planner.types", "planner.utils", "planner.storage_reservations"


def _in(module: str, *names: str) -> dict[str, str]:
    """Names that one module of this package has."""
    return dict.fromkeys(names, module)


_BENT_LOOPS = _in("parallel.pipelines", "TrainPipelineBase", "TrainPipelineSparseDist")

ADAPTED: Mapping[str, Mapping[str, str]] = {
    "torchrec": _in(_TABLES, "EmbeddingBagConfig", "EmbeddingConfig"),
    "torchrec.distributed.train_pipeline": _BENT_LOOPS,
    "torchrec.distributed.train_pipeline.train_pipelines": _BENT_LOOPS,
    "torchrec.distributed": {
        **_in(_MODEL, "DistributedModelParallel"),
        **_BENT_LOOPS,
        **_in("distributed.comm", "get_local_rank", "get_local_size"),
        **_in("distributed.types", "NoWait"),
        **_in(_INTERFACES, "ShardedModule"),
    },
    "torchrec.distributed.embedding_types": {
        **_in("distributed.embedding_types", "BaseEmbeddingSharder"),
        **_in("parallel.kernel_names", "EmbeddingComputeKernel"),
    },
    "torchrec.distributed.fbgemm_qcomm_codec": _in(
        "distributed.fbgemm_qcomm_codec", "get_qcomm_codecs_registry"
    ),
    "torchrec.distributed.fused_params": _in(
        "distributed.fused_params",
        *("FUSED_PARAM_BOUNDS_CHECK_MODE", "FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS"),
        "FUSED_PARAM_REGISTER_TBE_BOOL",
    ),
    "torchrec.distributed.global_settings": _in(
        "distributed.global_settings", "get_propogate_device", "set_propogate_device"
    ),
    "torchrec.distributed.embedding": _in(_SHARDERS, "EmbeddingCollectionSharder"),
    "torchrec.distributed.embeddingbag": _in(_SHARDERS, "EmbeddingBagCollectionSharder"),
    "torchrec.inference.modules": {
        **_in("quant.inference", "DEFAULT_FUSED_PARAMS", "DEFAULT_QUANTIZATION_DTYPE"),
        **_in("quant.inference", "DEFAULT_QUANT_MAPPING", "DEFAULT_SHARDERS"),
        **_in("quant.inference", "trim_torch_package_prefix_from_typename"),
    },
    "torchrec.distributed.model_parallel": {
        **_in(_MODEL, "DMPCollection", "DistributedModelParallel"),
        **_in(_MODEL, "get_unwrapped_module"),
        **_in(_SHARDERS, "get_default_sharders"),
        **_in(_INTERFACES, "DataParallelWrapper", "ShardedModule"),
    },
    "torchrec.distributed.planner": {
        **_in(_PLANNERS, "EmbeddingShardingPlanner"),
        **_in(_TOPOLOGIES, "Topology"),
        **_in(_CONSTRAINTS, "ParameterConstraints"),
        **_in(_UTILS, "bytes_to_gb", "sharder_name"),
    },
    "torchrec.distributed.planner.constants": _in(
        "planner.constants",
        *("BATCH_SIZE", "BIGINT_DTYPE", "CROSS_NODE_BANDWIDTH", "DDR_CAP", "DDR_MEM_BW", "HBM_CAP"),
        *("HBM_MEM_BW", "HBM_TO_DDR_MEM_BW", "INTRA_NODE_BANDWIDTH", "MIN_CW_DIM", "NUM_POOLINGS"),
        *("POOLING_FACTOR", "UVM_CACHING_RATIO"),
    ),
    "torchrec.distributed.planner.enumerators": {
        **_in(_ENUMERATORS, "EmbeddingEnumerator"),
        **_in(_UTILS, "get_partition_by_type"),
    },
    "torchrec.distributed.planner.partitioners": _in(
        _PARTITIONERS, "GreedyPerfPartitioner", "MemoryBalancedPartitioner", "SortBy"
    ),
    "torchrec.distributed.planner.perf_models": _in(_STATS, "NoopPerfModel", "NoopStorageModel"),
    "torchrec.distributed.planner.planners": {
        **_in(_PLANNERS, "EmbeddingShardingPlanner"),
    },
    "torchrec.distributed.planner.proposers": {
        **_in(_PROPOSERS, "DynamicProgrammingProposer", "GreedyProposer"),
        **_in(_PROPOSERS, "EmbeddingOffloadScaleupProposer", "GridSearchProposer", "UniformProposer"),
    },
    "torchrec.distributed.planner.shard_estimators": _in(
        _ESTIMATORS, "EmbeddingPerfEstimator", "EmbeddingStorageEstimator"
    ),
    "torchrec.distributed.planner.stats": _in(_STATS, "EmbeddingStats", "NoopEmbeddingStats"),
    "torchrec.distributed.planner.storage_reservations": _in(
        _RESERVED,
        *("FixedPercentageStorageReservation", "HeuristicalStorageReservation"),
        "InferenceStorageReservation",
    ),
    "torchrec.distributed.planner.types": {
        **_in(
            _PLANNER_TYPES,
            *("DeviceHardware", "Enumerator", "PartitionByType", "Partitioner", "Perf", "PerfModel"),
            *("PlanDebugStats", "PlannerError", "PlannerErrorType", "Proposer", "Shard", "ShardEstimator"),
            *("ShardingOption", "Stats", "Storage"),
        ),
        **_in(_TOPOLOGIES, "Topology"),
        **_in(_CONSTRAINTS, "ParameterConstraints"),
    },
    "torchrec.distributed.planner.utils": _in(
        _UTILS,
        *("bytes_to_gb", "bytes_to_mb", "gb_to_bytes", "mb_to_bytes", "placement", "reset_shard_rank"),
        "sharder_name",
    ),
    "torchrec.distributed.sharding_plan": {
        **_in(_SHARDERS, "EmbeddingBagCollectionSharder", "EmbeddingCollectionSharder"),
        **_in(_SHARDERS, "get_default_sharders"),
        **_in(_UTILS, "placement"),
    },
    "torchrec.distributed.comm": _in(
        "distributed.comm",
        *("get_group_rank", "get_local_rank", "get_local_size", "get_num_groups"),
        "intra_and_cross_node_pg",
    ),
    "torchrec.sparse.jagged_tensor": _in(_JAGGED, "jt_is_equal", "kjt_is_equal"),
    "torchrec.distributed.types": {
        **_in("distributed.types", "BoundsCheckMode", "CacheAlgorithm", "ModuleShardingPlan", "NoWait"),
        **_in("distributed.types", "PipelineType", "Shard", "ShardedTensor", "ShardedTensorMetadata"),
        **_in("distributed.types", "TensorProperties", "get_tensor_size_bytes"),
        **_in(_CONSTRAINTS, "CacheParams"),
        **_in(_INTERFACES, "ShardedModule", "ShardingPlanner"),
    },
    "torchrec.datasets": {},
    "torchrec.datasets.criteo": _in(
        "datasets.criteo",
        *("CAT_FEATURE_COUNT", "DAYS", "DEFAULT_CAT_NAMES", "DEFAULT_COLUMN_NAMES", "DEFAULT_INT_NAMES"),
        *("DEFAULT_LABEL_NAME", "INT_FEATURE_COUNT", "InMemoryBinaryCriteoIterDataPipe"),
        "TOTAL_TRAINING_SAMPLES",
    ),
    "torchrec.datasets.movielens": _in(
        "datasets.movielens",
        *("DEFAULT_COLUMN_NAMES", "DEFAULT_MOVIES_DATA_COLUMN_NAMES", "DEFAULT_RATINGS_COLUMN_NAMES"),
    ),
    "torchrec.datasets.random": _in("datasets.random", "RandomRecDataset"),
    "torchrec.datasets.utils": _in("datasets.utils", "Batch", "PATH_MANAGER_KEY"),
    "torchrec.metrics": {},
    **{
        f"torchrec.metrics.{name.lower()}": _in(_METRICS, f"{name}MetricComputation")
        for name in ("AUC", "Accuracy", "GAUC", "MAE", "MSE", "NE")
    },
    "torchrec.metrics.metrics_namespace": _in(_METRICS, "MetricPrefix"),
    "torchrec.metrics.rec_metric": _in(_METRICS, "MetricComputationReport", "RecMetricComputation"),
    "torchrec.models": {},
    "torchrec.models.deepfm": _in(
        "models.deepfm", "DenseArch", "FMInteractionArch", "OverArch", "SimpleDeepFMNN", "SparseArch"
    ),
    "torchrec.models.dlrm": _in(
        "models.dlrm",
        *("DLRM", "DLRMTrain", "DLRM_DCN", "DLRM_Projection", "DenseArch", "InteractionArch"),
        *("InteractionDCNArch", "InteractionProjectionArch", "OverArch", "SparseArch", "choose"),
    ),
    "torchrec.modules.activation": _in("modules.activation", "SwishLayerNorm"),
    "torchrec.modules.crossnet": _in("modules.crossnet", "CrossNet", "LowRankCrossNet"),
    "torchrec.modules.deepfm": _in("modules.deepfm", "DeepFM", "FactorizationMachine"),
    "torchrec.modules.embedding_configs": {
        **_in("modules.embedding_configs", "DATA_TYPE_NUM_BITS", "data_type_to_dtype"),
        **_in("modules.embedding_configs", "dtype_to_data_type"),
        **_in(_TABLES, "BaseEmbeddingConfig", "EmbeddingBagConfig", "EmbeddingConfig"),
    },
    "torchrec.inference.state_dict_transform": _in(
        "inference.state_dict_transform", "state_dict_gather", "state_dict_to_device"
    ),
    "torchrec.modules.embedding_modules": _in(
        "modules.interfaces",
        *("EmbeddingBagCollectionInterface", "EmbeddingCollectionInterface"),
        *("get_embedding_names_by_table", "reorder_inverse_indices"),
    ),
    "torchrec.modules.feature_processor": {
        **_in(_PROCESSORS, "BaseFeatureProcessor"),
        "BaseGroupedFeatureProcessor": f"{_PROCESSORS}:FeatureProcessorsCollection",
        "PositionWeightedModule": f"{_PROCESSORS}:PositionWeightedModuleDict",
        "PositionWeightedProcessor": f"{_PROCESSORS}:PositionWeightedModuleCollection",
    },
    "torchrec.modules.feature_processor_": _in(
        _PROCESSORS,
        *("FeatureProcessor", "FeatureProcessorsCollection", "PositionWeightedModule"),
        "PositionWeightedModuleCollection",
    ),
    "torchrec.modules.fp_embedding_modules": _in(_PROCESSORS, "FeatureProcessedEmbeddingBagCollection"),
    "torchrec.modules.fused_embedding_modules": _in(
        "modules.fused_embedding_modules",
        *("FusedEmbeddingBagCollection", "FusedEmbeddingCollection", "fuse_embedding_optimizer"),
    ),
    "torchrec.distributed.mc_embedding": _in(_MAPPED, "ManagedCollisionEmbeddingCollectionSharder"),
    "torchrec.distributed.mc_embeddingbag": _in(_MAPPED, "ManagedCollisionEmbeddingBagCollectionSharder"),
    "torchrec.modules.mc_adapter": _in(
        _MAPPED, "McEmbeddingBagCollectionAdapter", "McEmbeddingCollectionAdapter"
    ),
    "torchrec.modules.mc_embedding_modules": _in(
        _MAPPED,
        *("BaseManagedCollisionEmbeddingCollection", "ManagedCollisionEmbeddingBagCollection"),
        "ManagedCollisionEmbeddingCollection",
    ),
    "torchrec.modules.mc_modules": {
        **_in(_MAPS, "MCHManagedCollisionModule", "ManagedCollisionCollection", "ManagedCollisionModule"),
        **_in(_MAPS, "apply_mc_method_to_jt_dict"),
        **_in(_POLICIES, "DistanceLFU_EvictionPolicy", "LFU_EvictionPolicy", "LRU_EvictionPolicy"),
        **_in(_POLICIES, "MCHEvictionPolicy", "average_threshold_filter", "dynamic_threshold_filter"),
        **_in(_POLICIES, "probabilistic_threshold_filter"),
    },
    "torchrec.modules.mlp": _in("modules.mlp", "MLP", "Perceptron"),
    "torchrec.modules.regroup": _in("modules.regroup", "KTRegroupAsDict"),
    "torchrec.optim": {
        **_in(_OPTIMIZERS, *_OF_FBGEMM, "RowWiseAdagrad"),
    },
    "torchrec.optim.clipping": _in("optim.clipping", "GradientClipping", "GradientClippingOptimizer"),
    "torchrec.optim.fused": _in(
        "optim.fused", "EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule"
    ),
    "torchrec.optim.optimizers": _in(_OPTIMIZERS, *_OF_FBGEMM),
    "torchrec.optim.rowwise_adagrad": _in(_OPTIMIZERS, "RowWiseAdagrad"),
    "torchrec.test_utils": _in("distributed.comm", "get_free_port"),
    "torchrec.types": _in("types", "CacheMixin", "CopyMixIn", "ModuleNoCopyMixin"),
    "torchrec.streamable": _in("streamable", "Multistreamable", "Pipelineable"),
}
"""TorchRec's module paths -> names of theirs -> the module of this package that has them, or `"module:name there"`."""

PATHS = sorted({*MODULES, *QUANTIZED, *ADAPTED})
"""All of TorchRec's module paths that are here."""


class _Names(ModuleType):
    """One of TorchRec's modules; its names are looked up in shardwright."""

    __version__ = f"shardwright {shardwright.__version__}"

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # `from ... import *`
            return _names(self.__name__)
        below = f"{self.__name__}.{name}"
        if below in PATHS and name not in _names(self.__name__):
            return importlib.import_module(below)
        return find(self.__name__, name)

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # functions of a script's own module refer to it where they are sent
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_names(self.__name__)})


def find(module: str, name: str) -> Any:
    """The class, function or constant that has a name of TorchRec's; `torchrec` itself need not be served for that.

    Args:
        module: TorchRec's module path.
        name: name in it.

    Raises:
        AttributeError: shardwright has none there; the text says where, or names the nearest.
    """
    if name in MODULES.get(module, ()):
        if name in _SCRIPTED and is_installed():
            importlib.import_module(_SCRIPTING).install(lazily=True)  # not before: it imports torch
            _load_operators()
        return getattr(shardwright, name)
    if name in QUANTIZED.get(module, ()):
        return getattr(importlib.import_module("shardwright_torchrec.quant"), QUANTIZED[module][name])
    if (owner := _owner(module, name)) is not None:
        return getattr(*owner)
    hint = "" if name.startswith("__") else f" {_whereabouts(module, name)}"
    raise AttributeError(f"{module!r} is shardwright here, which has no {name!r} there.{hint}")


def _load_operators() -> None:
    """Load FBGEMM where it is installed: scripts that import TorchRec have `torch.ops.fbgemm` by that."""
    with suppress(ImportError, OSError):  # without it, or with one of another torch, what needs it says so
        importlib.import_module("fbgemm_gpu")


def _owner(module: str, name: str) -> tuple[ModuleType, str] | None:
    """The module of this package that has a name of TorchRec's, and what it is called there; none if it is not here."""
    if name not in ADAPTED.get(module, ()):
        return None
    own, _, there = ADAPTED[module][name].partition(":")
    return importlib.import_module(f"shardwright_torchrec.{own}"), there or name


class _Finder(MetaPathFinder, Loader):
    """Answers every import of `torchrec` and below, so that two libraries never mix."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of one of `MODULES`; none for what is not TorchRec's.

        Raises:
            ModuleNotFoundError: It is TorchRec's, and shardwright has nothing for it.
        """
        if fullname.partition(".")[0] != ROOT:
            return None
        if fullname not in PATHS:
            raise ModuleNotFoundError(
                f"{ROOT!r} is shardwright here, which has nothing for {fullname!r}.{_nearest(fullname, PATHS)} "
                f"shardwright_torchrec.uninstall() gives the name back to TorchRec.",
                name=fullname,
            )
        return ModuleSpec(fullname, self, origin="shardwright_torchrec", is_package=_is_package(fullname))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module that knows where its names are."""
        return _Names(spec.name, f"shardwright under the name {spec.name}.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be run: names are looked up when they are asked for."""


_finder = _Finder()


def install() -> None:
    """Let `import torchrec`, and the modules below it, give shardwright in this process and those that it starts.

    Call it before anything imports `torchrec`. A second call does nothing. Processes that are started from here learn
    of it by the variable `SHARDWRIGHT_TORCHREC`, where this distribution is installed.

    Raises:
        ImportError: TorchRec itself was imported already.
    """
    if is_installed():
        return
    imported = sys.modules.get(ROOT)
    if imported is not None:
        file = getattr(imported, "__file__", None)
        raise ImportError(
            f"TorchRec itself was imported already, from {file}: its classes are in use. "
            "Call shardwright_torchrec.install() before the first `import torchrec`."
        )
    sys.meta_path.insert(0, _finder)
    os.environ[VARIABLE] = "1"


def uninstall() -> None:
    """Give the name `torchrec` back; what was imported under it stays usable."""
    if is_installed():
        sys.meta_path.remove(_finder)
        if (scripting := sys.modules.get(_SCRIPTING)) is not None:
            scripting.uninstall()
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not Waiting]
    os.environ.pop(VARIABLE, None)
    for name in list(_imported()):
        del sys.modules[name]


def find_spec(name: str) -> ModuleSpec | None:
    """The spec of one of TorchRec's modules, as shardwright serves it."""
    return _finder.find_spec(name)


def is_installed() -> bool:
    """True if `import torchrec` gives shardwright."""
    return _finder in sys.meta_path


def _imported() -> Iterator[str]:
    return (name for name, module in list(sys.modules.items()) if isinstance(module, _Names))


def _is_package(name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in PATHS)


def _whereabouts(module: str, name: str) -> str:
    """Name the modules that have a name, or the names of a module with the nearest."""
    elsewhere = [path for path in PATHS if name in _names(path)]
    if elsewhere:
        return f"It is in {', '.join(elsewhere)}."
    return f"Known: {', '.join(sorted(_names(module))) or 'none'}.{_nearest(name, _names(module))}"


def _names(path: str) -> list[str]:
    """All names in one of the modules."""
    return [*MODULES.get(path, ()), *QUANTIZED.get(path, ()), *ADAPTED.get(path, ())]


def _nearest(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
