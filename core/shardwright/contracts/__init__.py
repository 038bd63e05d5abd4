"""The kinds of plugins, one abstract class a file."""

from shardwright.contracts.codec import Codec, CommType
from shardwright.contracts.comm_backend import Arrivals, CommBackend, Communicator, Work
from shardwright.contracts.compute_kernel import (
    NAMED_ONLY,
    NO_COLUMNS,
    WEIGHTS,
    ComputeKernel,
    EmbeddingComputeKernel,
    KernelRequest,
    KernelWork,
)
from shardwright.contracts.estimator import Estimator
from shardwright.contracts.extension import Extension, Finding, StepListener, TrainedCollection
from shardwright.contracts.optimizer import Optimizer, RowRule
from shardwright.contracts.partitioner import Partitioner
from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.contracts.row_format import RowFormat
from shardwright.contracts.sharding_type import Offered, ShardingType

__all__ = [
    "NAMED_ONLY",
    "NO_COLUMNS",
    "WEIGHTS",
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
    "StepListener",
    "TrainedCollection",
    "Work",
]
