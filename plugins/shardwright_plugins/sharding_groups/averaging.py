"""Replicas of sharded tables, averaged over sharding groups: weights, and optimizer state that kernels keep.

An averaging, by every rank, among the ranks that hold its shards (its replica group), in this order: 1. a gathering of
which averaging it is, of what, and after which calls; then, bucket after bucket, 2. an all-reduce, in rank order and in
float32 at least. The parts of the next bucket travel while this one's are added. The order of the sum
makes copies that a group has on several ranks stay equal bit for bit.

Legend: R ranks of a replica group, N elements of a bucket.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator
from shardwright.errors import UnsupportedError
from shardwright.runtime.ranks.together import check_alike
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.tables.same_weights import copy_from_first
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
from shardwright_plugins.sharding_groups.environment import ShardingEnv2D

BUCKET_BYTES = 16 << 20
"""Weights and state that are averaged at once: some four times as much is in flight."""
REPLICAS = "replicas to average"
"""Label of the exchanges."""
_STEP = "step"


_ALIKE = (
    "Ranks that hold the same shards must make the same calls of sync(), with the same arguments, of models with the "
    "same plan, and all sharding groups the same calls of their collections: leave a batch that is wrong in one of "
    "them out in all, or train with a pipeline or lockstep_batches, which do"
)


class _Bucket:
    """The averaging of tensors of one dtype that travel together, each ``[rows, columns]`` a run of rows of a shard's.

    Args:
        pieces: the tensors.
        communicator: communicator of the replica group.
    """

    def __init__(self, pieces: Sequence[Tensor], communicator: Communicator) -> None:
        self._pieces = pieces
        self._values = torch.cat([piece.reshape(-1) for piece in pieces])
        self._work = communicator.all_reduce(self._values, mean=True, label=REPLICAS)

    def finish(self) -> None:
        """Wait, and write the means."""
        self._work.wait()
        sizes = [piece.numel() for piece in self._pieces]
        for piece, values in zip(self._pieces, self._values.split(sizes), strict=True):
            piece.copy_(values.view(piece.shape))


class Averaging:
    """The averagings of a model's sharded collections.

    Args:
        env: the ranks.
        collections: the sharded collections; of the same plan in every group.

    Raises:
        UnsupportedError: a table is of integers, or its kernel gives rows to ids by itself.
    """

    def __init__(self, env: ShardingEnv2D, collections: Sequence[ShardedCollection]) -> None:
        self._env, self._number, self._collections = env, 0, collections
        for table in self._tables:
            _check_can_be_averaged(table)

    @property
    def _tables(self) -> list[ShardedTable]:
        """The tables as they are sharded now: a resharding makes new ones."""
        return [table for module in self._collections for table in module.sharded_tables.values()]

    @torch.no_grad()
    def copy_from_first(self) -> None:
        """Give all replicas the weights of the first sharding group; every rank makes this call."""
        communicator = self._env.replicas.communicator
        if communicator.world_size == 1:
            return
        for tensor in self._tensors(include_optimizer_state=False):
            copy_from_first(tensor, communicator)

    @torch.no_grad()
    def average(self, *, include_optimizer_state: bool) -> None:
        """Average weights, and optimizer state if wanted; every rank makes this call.

        Raises:
            DistributedError: a replica was lost, or averages something else, or its group made other calls before.
        """
        if self._env.replicas.world_size == 1:
            return
        tensors = list(self._tensors(include_optimizer_state=include_optimizer_state))
        self._meet(tensors, include_optimizer_state)
        communicator, under_way = self._env.replicas.communicator, list[_Bucket]()
        for pieces in _buckets(tensors):
            under_way.append(_Bucket(pieces, communicator))
            if len(under_way) > 1:
                under_way.pop(0).finish()
        for last in under_way:
            last.finish()

    def _tensors(self, *, include_optimizer_state: bool) -> Iterator[Tensor]:
        """Yield the tensors to average, each ``[rows, columns]``, in the same order on all replicas."""
        for table in self._tables:
            for local in table.state.local:
                yield table.weight_of(local)
                if include_optimizer_state and table.is_fused:
                    state = table.lookup_of(local).optimizer_state(local.index)
                    yield from (state[name] for name in sorted(state) if name != _STEP)

    def _meet(self, tensors: Sequence[Tensor], include_optimizer_state: bool) -> None:
        """Check that all ranks of the replica group begin the same averaging.

        Raises:
            DistributedError: they do not; the same text on every one.
        """
        self._number += 1
        form = zlib.crc32(repr([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]).encode())
        mine = {
            "number": self._number,
            "optimizer_state": include_optimizer_state,
            "shards": form,
            "calls_before": self._env.lockstep.word,
        }
        communicator = self._env.replicas.communicator
        told = communicator.all_gather_objects(mine)
        check_alike("an averaging", told, communicator.global_ranks, _ALIKE)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """All rows of all tensors, those of one dtype together, in runs of some size."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for own in by_dtype.values():
        pieces = [piece for tensor in own for piece in _runs(tensor)]
        ends = accumulate(piece.numel() * piece.element_size() for piece in pieces)
        taken: dict[int, list[Tensor]] = {}
        for piece, end in zip(pieces, ends, strict=True):
            taken.setdefault((end - 1) // BUCKET_BYTES, []).append(piece)
        yield from taken.values()


def _runs(tensor: Tensor) -> Sequence[Tensor]:
    """The rows of a tensor in runs of no more than a bucket's bytes, but one row at least."""
    row_bytes = tensor[0].numel() * tensor.element_size()
    return tensor.split(max(BUCKET_BYTES // row_bytes, 1))


def _check_can_be_averaged(table: ShardedTable) -> None:
    """Check that rows of a table are those of the same ids in all groups, and numbers that have a mean.

    Raises:
        UnsupportedError: they are not.
    """
    spec = table.state.table
    if table.row_state:
        raise UnsupportedError(
            f"table {spec.describe()} has the compute kernel {table.state.sharding.compute_kernel!r}, which gives rows "
            "to ids by itself: in each sharding group a row would be another id's, so that rows cannot be averaged. "
            "Train it with DistributedModelParallel, or with a kernel whose rows are the ids"
        )
    weights = [table.weight_of(local) for local in table.state.local]
    if any(not weight.is_floating_point() for weight in weights):
        raise UnsupportedError(
            f"table {spec.describe()} has weights of {weights[0].dtype}, which have no mean over sharding groups"
        )
