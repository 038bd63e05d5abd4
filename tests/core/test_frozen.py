"""What others build on: public names and hooks. To change them, edit this file, and read docs/authors/versions.md."""

from __future__ import annotations

import inspect

import pytest

import shardwright
from shardwright import contracts, hookspecs, testing

PUBLIC_NAMES = """
    Awaitable
    Bags
    Block
    BlockRun
    BlockSpec
    CacheParams
    CacheStatistics
    CheckedPlan
    Codec
    ColumnRange
    CombinedOptimizer
    CommBackend
    CommType
    Communicator
    ComputeKernel
    DataType
    Dataflow
    DirectReturn
    DistributedError
    DistributedModelParallel
    DocumentKind
    DuplicateNameError
    EmbeddingBagCollection
    EmbeddingBagCollectionSharder
    EmbeddingBagConfig
    EmbeddingCollection
    EmbeddingCollectionSharder
    EmbeddingComputeKernel
    EmbeddingConfig
    EmbeddingModuleShardingPlan
    EmbeddingOffloadStats
    EmbeddingShardingPlanner
    EnumerableShardingSpec
    Estimator
    Exchange
    Explanation
    Feedback
    Fingerprint
    FixedAbsoluteStorageReservation
    FixedPercentageStorageReservation
    HeuristicalStorageReservation
    Hierarchical
    InferenceStorageReservation
    InvalidInputError
    JaggedTensor
    KernelRequest
    KeyedJaggedTensor
    KeyedOptimizer
    KeyedOptimizerWrapper
    KeyedTensor
    Layout
    LazyAdam
    LazyAwaitable
    Lookup
    Misfit
    ModuleSharder
    NoPlanError
    Offered
    OptimizerSpec
    OptimizerWrapper
    OptionSpace
    Options
    ParameterConstraints
    ParameterSharding
    Executor
    ExecutorStep
    Partitioner
    Placed
    PlacedPlan
    PlanDifference
    PlanError
    PlanningError
    PluginHost
    PluginLoadError
    PluginMismatchError
    PoolingType
    Progress
    Proposals
    ProposedShards
    Proposer
    Proven
    QCommsConfig
    Registry
    Replicate
    ReturnPath
    ReturnStep
    Routed
    RowMap
    RowPart
    RowWiseAdagrad
    RowsModulo
    RowsRange
    RowsSplit
    SearchSpace
    ShardMetadata
    ShardedEmbeddingBagCollection
    ShardedEmbeddingCollection
    ShardingEnv
    ShardingPlan
    ShardingType
    ShardwrightError
    StorageReservation
    TableSpec
    Topology
    TorchCommunicator
    TrainPipelineBase
    TrainPipelineSparseDist
    UnknownNameError
    UnknownPluginError
    UnsupportedError
    Watch
    Work
    Workload
    __version__
    apply_optimizer_in_backward
    check_plan
    compare_fingerprints
    compare_plans
    explain_table
    get_qcomm_codecs_registry
    hookimpl
    host
    in_backward_optimizer_filter
    lockstep_batches
    optimizer_spec_of
    register_fused_optimizer
    register_sharder
    spec_to_torch
    use_host
"""

CONTRACTS = """
    Codec
    CommBackend
    CommType
    Communicator
    ComputeKernel
    EmbeddingComputeKernel
    Estimator
    KernelRequest
    Offered
    Partitioner
    Proposals
    Proposer
    ShardingType
    Work
"""

TESTING = """
    CodecTests
    CommBackendTests
    ComputeKernelTests
    EstimatorTests
    PartitionerTests
    ProposerTests
    RankError
    RankPool
    ShardingTypeTests
    SimulatedCommunicator
    check_codec
    installed
    run_simulated
"""

HOOKS = """
    def shardwright_codecs() -> 'Sequence[type[Codec] | Codec]'
    def shardwright_comm_backends() -> 'Sequence[type[CommBackend] | CommBackend]'
    def shardwright_compute_kernels() -> 'Sequence[type[ComputeKernel] | ComputeKernel]'
    def shardwright_estimators() -> 'Sequence[type[Estimator] | Estimator]'
    def shardwright_partitioners() -> 'Sequence[type[Partitioner] | Partitioner]'
    def shardwright_proposers() -> 'Sequence[type[Proposer] | Proposer]'
    def shardwright_sharding_types() -> 'Sequence[type[ShardingType] | ShardingType]'
"""


@pytest.mark.parametrize(
    ("module", "frozen"), [(shardwright, PUBLIC_NAMES), (contracts, CONTRACTS), (testing, TESTING)]
)
def test_public_names_are_frozen(module: object, frozen: str) -> None:
    assert list(module.__all__) == frozen.split()


def test_public_names_are_all_there() -> None:
    assert [name for name in shardwright.__all__ if not hasattr(shardwright, name)] == []


def test_hooks_are_frozen() -> None:
    functions = inspect.getmembers(hookspecs, inspect.isfunction)
    found = [
        f"def {name}{inspect.signature(one)}" for name, one in functions if name.startswith("shardwright_")
    ]
    assert found == [line.strip() for line in HOOKS.strip().splitlines()]
