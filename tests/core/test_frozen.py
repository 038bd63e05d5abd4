"""What others build on: public names and hooks. To change them, edit this file, and read docs/authors/versions.md.

What a kind brings is in its row: the contract, its tests, the hook. The README's block of hooks holds the rows.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tests.core.stubs import OWN_NAMES

import shardwright
import shardwright_testing as testing
from shardwright import contracts, hookspecs, host
from shardwright.host.offers import Kind

PUBLIC_NAMES = """
    AllToAll
    Answers
    Arrivals
    Awaitable
    Backward
    Bags
    Block
    BlockRun
    BlockSpec
    CacheParams
    CacheStatistics
    CheckedPlan
    CheckpointError
    Collection
    CollectiveWatch
    ColumnRange
    Columns
    CombinedOptimizer
    CommType
    Communicator
    CopyToDevice
    DataType
    Dataflow
    DefaultDataParallelWrapper
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
    EvalPipelineSparseDist
    Evaluate
    Exchange
    ExchangeHeaders
    ExchangeIds
    Executor
    ExecutorConfig
    ExecutorStep
    ExplainedOption
    Explanation
    FeatureBatch
    Feedback
    Finding
    Forward
    IdRangeError
    InvalidInputError
    JaggedTensor
    KernelGroup
    KernelRequest
    KernelWork
    KeyedJaggedTensor
    KeyedOptimizer
    KeyedOptimizerWrapper
    KeyedTensor
    Layout
    LazyAdam
    LazyAwaitable
    LeaveAlone
    LoadedCheckpoint
    LoadedPlan
    Lookup
    LookupBuilder
    Misfit
    ModuleSharder
    NAMED_ONLY
    NameNotLoadedError
    NoPlanError
    Offered
    OptimizerSpec
    OptimizerStep
    OptimizerWrapper
    OptionSpace
    Options
    Outcome
    ParameterConstraints
    ParameterSharding
    PathSlots
    PeerHeaders
    PieceRequest
    PipelineStage
    PipelineStep
    Placed
    PlanDifference
    PlanError
    PlanningError
    PluginLoadError
    PluginMismatchError
    PoolingType
    Prefetch
    PrefetchTrainPipelineSparseDist
    Progress
    Proposals
    ProposedShards
    Proven
    QCommsConfig
    Refusal
    Replicas
    ReshardMoves
    ReturnPath
    ReturnStep
    Routed
    RoutingPlan
    RowFormat
    RowIndex
    RowMap
    RowPart
    RowRule
    RowWiseAdagrad
    RowsModulo
    RowsRange
    RowsSplit
    SavedCheckpoint
    SearchSpace
    ShardMetadata
    ShardedEmbeddingBagCollection
    ShardedEmbeddingCollection
    ShardingEnv
    ShardingPlan
    ShardwrightError
    StageAround
    StorageReservation
    StoredCheckpoint
    StoredTensor
    TableChange
    TableCollection
    TableMoves
    TableSpec
    Topology
    TorchCommunicator
    TrainPipeline
    TrainPipelineBase
    TrainPipelineSparseDist
    Transport
    UnknownNameError
    UnknownPluginError
    UnsupportedError
    Watch
    Work
    Workload
    ZeroGrad
    __version__
    apply_optimizer_in_backward
    check_plan
    clip_grad_norm_
    compare_plans
    explain_table
    hookimpl
    in_backward_optimizer_filter
    load_checkpoint
    lockstep_batches
    open_checkpoint
    optimizer_spec_of
    register_fused_optimizer
    save_checkpoint
    spec_to_torch
"""

CONTRACTS = """
    Arrivals
    CommType
    Communicator
    EmbeddingComputeKernel
    Finding
    KernelRequest
    KernelWork
    NAMED_ONLY
    NO_COLUMNS
    Offered
    Proposals
    RowFormat
    RowRule
    StepListener
    TrainedCollection
    WEIGHTS
    Work
"""

HOST = """
    Fingerprint
    PluginHost
    Registry
    compare_fingerprints
    host
    use_host
"""

TESTING = """
    RankError
    RankPool
    RowFormatTests
    RowIndexTests
    ServingKernelTests
    SimulatedCommunicator
    check_codec
    installed
    run_simulated
"""

CONTRACTS_OF_KINDS = [kind.contract.__name__ for kind in hookspecs.KINDS]
KITS_OF_KINDS = [f"{name}Tests" for name in CONTRACTS_OF_KINDS]


@pytest.mark.parametrize(
    ("module", "frozen", "of_kinds"),
    [
        (shardwright, PUBLIC_NAMES, CONTRACTS_OF_KINDS),
        (contracts, CONTRACTS, CONTRACTS_OF_KINDS),
        (host, HOST, []),
        (testing, TESTING, KITS_OF_KINDS),
    ],
)
def test_public_names_are_frozen(module: object, frozen: str, of_kinds: list[str]) -> None:
    assert sorted(module.__all__) == sorted([*frozen.split(), *of_kinds])


def test_public_names_are_all_there() -> None:
    assert [name for name in OWN_NAMES if not hasattr(shardwright, name)] == []


@pytest.mark.parametrize("kind", hookspecs.KINDS, ids=lambda kind: kind.name)
def test_hooks_are_frozen(kind: Kind[Any]) -> None:
    contract = kind.contract.__name__
    signature = inspect.signature(getattr(hookspecs, kind.hook))
    assert kind.hook == f"shardwright_{kind.name}s"
    assert str(signature) == f"() -> 'Sequence[type[{contract}] | {contract}]'"
