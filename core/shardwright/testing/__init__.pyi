# Made by `python -m tests.core.stubs`.
from shardwright.testing.codecs import CodecTests as CodecTests
from shardwright.testing.codecs import check_codec as check_codec
from shardwright.testing.comm_backends import CommBackendTests as CommBackendTests
from shardwright.testing.commands import CommandTests as CommandTests
from shardwright.testing.compute_kernels import ComputeKernelTests as ComputeKernelTests
from shardwright.testing.estimators import EstimatorTests as EstimatorTests
from shardwright.testing.optimizers import OptimizerTests as OptimizerTests
from shardwright.testing.partitioners import PartitionerTests as PartitionerTests
from shardwright.testing.plugins_under_test import installed as installed
from shardwright.testing.proposers import ProposerTests as ProposerTests
from shardwright.testing.ranks import RankError as RankError
from shardwright.testing.ranks import RankPool as RankPool
from shardwright.testing.serving_kernels import ServingKernelTests as ServingKernelTests
from shardwright.testing.sharding_types import ShardingTypeTests as ShardingTypeTests
from shardwright.testing.simulated import SimulatedCommunicator as SimulatedCommunicator
from shardwright.testing.simulated import run_simulated as run_simulated

__all__: list[str]
