"""TorchRec 1.8's module paths, and where the names in them are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_CONFIGS = ("DataType", "PoolingType")


COLLECTIONS = ("EmbeddingBagCollection", "EmbeddingCollection")


SPARSE = ("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor")


_GROUPS = ("DefaultDataParallelWrapper",)


_LOOPS = ("EvalPipelineSparseDist", "PrefetchTrainPipelineSparseDist")


_PLANS = ("EmbeddingModuleShardingPlan", "ParameterSharding", "ShardMetadata", "ShardingPlan")


_APPLY = ("apply_optimizer_in_backward",)


_KEYED = ("CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")


MODULES: Mapping[str, Sequence[str]] = {
    "torchrec": (*_CONFIGS, *COLLECTIONS, *SPARSE),
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
    "torchrec.modules.embedding_modules": COLLECTIONS,
    "torchrec.optim": (*_APPLY, *_KEYED),
    "torchrec.optim.apply_optimizer_in_backward": _APPLY,
    "torchrec.optim.keyed": _KEYED,
    "torchrec.optim.optimizers": ("in_backward_optimizer_filter",),
    "torchrec.sparse": (),
    "torchrec.sparse.jagged_tensor": SPARSE,
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
