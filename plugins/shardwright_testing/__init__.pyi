# Made by `python -m tests.core.stubs`.
from shardwright_testing.codecs import CodecTests as CodecTests
from shardwright_testing.codecs import check_codec as check_codec
from shardwright_testing.comm_backends import CommBackendTests as CommBackendTests
from shardwright_testing.compute_kernels import ComputeKernelTests as ComputeKernelTests
from shardwright_testing.estimators import EstimatorTests as EstimatorTests
from shardwright_testing.extensions import ExtensionTests as ExtensionTests
from shardwright_testing.kernels.row_indexes import RowIndexTests as RowIndexTests
from shardwright_testing.optimizers import OptimizerTests as OptimizerTests
from shardwright_testing.partitioners import PartitionerTests as PartitionerTests
from shardwright_testing.plugins_under_test import installed as installed
from shardwright_testing.proposers import ProposerTests as ProposerTests
from shardwright_testing.ranks import RankError as RankError
from shardwright_testing.ranks import RankPool as RankPool
from shardwright_testing.row_formats import RowFormatTests as RowFormatTests
from shardwright_testing.serving_kernels import ServingKernelTests as ServingKernelTests
from shardwright_testing.sharding_types import ShardingTypeTests as ShardingTypeTests
from shardwright_testing.simulated import SimulatedCommunicator as SimulatedCommunicator
from shardwright_testing.simulated import run_simulated as run_simulated

__all__: list[str]
