"""Replicas of sharded tables, averaged over sharding groups: weights, and optimizer state that kernels keep.

An averaging, by every rank, among the ranks that hold its shards (its replica group), in this order: 1. a header of
four integers: which averaging it is, of what, and after which calls; then, bucket after bucket, 2. an all-to-all by
which each rank gets its part of everybody's bucket, and adds them up in rank order, in float32 at least; 3. an
all-to-all by which each gets the means of all parts. ``(R - 1) / R`` of the bytes leave a rank twice. The parts of the
next bucket travel while this one's are added. The order of the sum makes copies that a group has on several ranks stay
equal bit for bit.

Legend: R ranks of a replica group, N elements of a bucket.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.errors import UnsupportedError
from shardwright.runtime.ranks.sharding_groups import ShardingEnv2D
from shardwright.runtime.ranks.together import check_alike
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.tables.same_weights import copy_from_first
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable

BUCKET_BYTES = 16 << 20
"""Weights and state that are averaged at once: some four times as much is in flight."""
HEADERS, PARTS, MEANS = "headers of an averaging", "replicas to average", "averaged replicas"
"""Labels of the exchanges."""
_STEP = "step"


_ALIKE = (
    "Ranks that hold the same shards must make the same calls of sync(), with the same arguments, of models with the "
    "same plan, and all sharding groups the same calls of their collections: leave a batch that is wrong in one of "
    "them out in all, or train with a pipeline or lockstep_batches, which do"
)


class _AveragingHeader(NamedTuple):
    """The header of an averaging; it must be the same on all ranks of a replica group."""

    number: int
    optimizer_state: int
    shards: int
    calls_before: int


@frozen(eq=False)
class _Bucket:
    """Tensors of one dtype that travel together, each ``[rows, columns]`` a run of rows of a shard's."""

    pieces: Sequence[Tensor]

    @property
    def flat(self) -> Tensor:
        """The values, ``[N]``."""
        return torch.cat([piece.reshape(-1) for piece in self.pieces])

    def write(self, flat: Tensor) -> None:
        """Take values over, ``[N]``."""
        sizes = [piece.numel() for piece in self.pieces]
        for piece, values in zip(self.pieces, flat.split(sizes), strict=True):
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
        under_way: _BucketAverage | None = None
        for bucket in _buckets(tensors):
            begun = _BucketAverage(bucket, self._env.replicas.communicator)
            if under_way is not None:
                under_way.finish()
            under_way = begun
        if under_way is not None:
            under_way.finish()

    def _tensors(self, *, include_optimizer_state: bool) -> Iterator[Tensor]:
        """Yield the tensors to average, each ``[rows, columns]``, in the same order on all replicas."""
        for table in self._tables:
            for local in table.state.local:
                yield table.weight_of(local)
                if include_optimizer_state and table.is_fused:
                    state = table.lookup_of(local).optimizer_state(local.index)
                    yield from (state[name] for name in sorted(state) if name != _STEP)

    def _meet(self, tensors: Sequence[Tensor], include_optimizer_state: bool) -> None:
        """Exchange headers, and check that they are equal.

        Raises:
            DistributedError: they are not; the same text on every rank of the replica group.
        """
        self._number += 1
        form = zlib.crc32(repr([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]).encode())
        checksum = self._env.lockstep.checksum
        mine = _AveragingHeader(self._number, int(include_optimizer_state), form, checksum)
        told = [header._asdict() for header in self._exchange_headers(mine)]
        check_alike("an averaging", told, self._env.replicas.communicator.global_ranks, _ALIKE)

    def _exchange_headers(self, mine: _AveragingHeader) -> list[_AveragingHeader]:
        channel, device = self._env.replicas.header_channel
        splits = [len(mine)] * channel.world_size
        sent = torch.tensor(mine * channel.world_size, device=device)
        received = torch.empty_like(sent)
        channel.all_to_all(received, sent, splits, splits, label=HEADERS).wait()
        return [_AveragingHeader(*row) for row in received.view(-1, len(mine)).tolist()]


class _BucketAverage:
    """The averaging of one bucket, its parts under way."""

    def __init__(self, bucket: _Bucket, communicator: Communicator) -> None:
        self._bucket, self._communicator = bucket, communicator
        flat = bucket.flat
        ranks = communicator.world_size
        self._item_bytes, self._num_elements = flat.element_size(), flat.numel()
        # Part r of a bucket is added up by rank r.
        bounds = [flat.numel() * rank // ranks for rank in range(ranks + 1)]
        self._sizes = [stop - start for start, stop in pairwise(bounds)]
        self._mine = self._sizes[communicator.rank]
        self._received = flat.new_empty(ranks * self._mine)
        self._work = self._start(self._received, flat, [self._mine] * ranks, self._sizes, PARTS)

    def _start(
        self, output: Tensor, sent: Tensor, output_sizes: Sequence[int], sizes: Sequence[int], label: str
    ) -> Work:
        """An all-to-all of bytes: not all backends send all dtypes."""
        taken, given = ([self._item_bytes * size for size in own] for own in (output_sizes, sizes))
        return self._communicator.all_to_all(
            output.view(torch.uint8), sent.view(torch.uint8), taken, given, label=label
        )

    def finish(self) -> None:
        """Wait for the parts, add them up, send the mean to all, and take everybody's."""
        self._work.wait()
        ranks = self._communicator.world_size
        mean = _mean(self._received.view(ranks, self._mine))
        whole = mean.new_empty(self._num_elements)
        sent, sizes = mean.repeat(ranks), [self._mine] * ranks
        self._start(whole, sent, self._sizes, sizes, MEANS).wait()
        self._bucket.write(whole)


def _mean(values: Tensor) -> Tensor:
    """The mean over ranks of ``[R, N]``, added up in rank order: ``[N]``."""
    first, *others = values
    total = first.to(torch.promote_types(values.dtype, torch.float32), copy=True)
    for other in others:
        total += other
    return total.div_(len(values)).to(values.dtype)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[_Bucket]:
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
        yield from (_Bucket(together) for together in taken.values())


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
    if table.keeps_rows:
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
