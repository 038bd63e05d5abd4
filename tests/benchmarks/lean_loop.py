"""A hand-written lean loop: what a step of row-cut tables costs with nothing but torch.distributed and FBGEMM.

    python tests/benchmarks/lean_loop.py --types row_wise --batch 1024 --tables 24 --rows 100000 --dim 64 --ids 10

Takes the options of steps/step.py and prints one JSON line, so that it can stand after --beside. It does
the work of one sharding type and no more: no plans, no checks, no names, equal batches and equal tables. --check
compares results and updated weights with tables that are not sharded.

What it knows is a *home* for each table: a column range on the ranks of one host, rows cut over these. table_wise is a
home of one rank, row_wise a home of all ranks, table_row_wise a host, grid_shard a host for each of two column halves.

Legend: W ranks, H homes (hosts), L ranks of a home, B batch size, T tables, C columns of all blocks of a home.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

RATE, EPSILON = 0.02, 1e-8
NUM_BATCHES = 4


@dataclass(frozen=True)
class Homes:
    """Which blocks, (table, first column, last column), each of H homes of L ranks has; rank ``h * L + l``."""

    size: int
    blocks: list[list[tuple[int, int, int]]]

    @classmethod
    def of(cls, options: argparse.Namespace) -> Homes:
        ranks, hosts, tables, dim = options.ranks, options.hosts, options.tables, options.dim
        number = {"table_wise": ranks, "row_wise": 1, "table_row_wise": hosts, "grid_shard": hosts}[
            options.types
        ]
        cuts = [(0, dim // 2), (dim // 2, dim)] if options.types == "grid_shard" else [(0, dim)]
        blocks: list[list[tuple[int, int, int]]] = [[] for _ in range(number)]
        for index, (table, cut) in enumerate((t, cut) for t in range(tables) for cut in cuts):
            blocks[index % number].append((table, *cut))
        return cls(ranks // number, blocks)


class LeanLoop:
    """One rank of the loop: forward and backward, the optimizer in FBGEMM's backward pass."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rank, self.homes = options, dist.get_rank(), Homes.of(options)
        size, number = self.homes.size, len(self.homes.blocks)
        self.home, self.local = divmod(self.rank, size)
        self.part_rows = -(-options.rows // size)
        self.widths = [sum(stop - start for _, start, stop in blocks) for blocks in self.homes.blocks]
        # Tables that each home reads; a table with two blocks there is sent once.
        self.tables = [list(dict.fromkeys(table for table, *_ in blocks)) for blocks in self.homes.blocks]
        self.neighbours, self.counterparts = self._process_groups(size, number)
        self.tbe = self._kernel()
        self._plan_orders()

    def _process_groups(
        self, size: int, number: int
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The ranks of this home, and those of all homes with this local rank; ``None`` for a rank alone."""
        inside = [dist.new_group(list(range(h * size, (h + 1) * size))) for h in range(number)]
        across = [dist.new_group(list(range(local, number * size, size))) for local in range(size)]
        return inside[self.home] if size > 1 else None, across[self.local] if number > 1 else None

    def _kernel(self) -> SplitTableBatchedEmbeddingBagsCodegen:
        options = self.options
        rows = max(0, min(self.part_rows, options.rows - self.local * self.part_rows))
        blocks = self.homes.blocks[self.home]
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, stop - start, EmbeddingLocation.HOST, ComputeDevice.CPU) for _, start, stop in blocks],
            weights_precision=SparseType.FP32,
            output_dtype=SparseType.FP32,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=RATE,
            eps=EPSILON,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
        )

    def _plan_orders(self) -> None:
        """Orders that no batch changes: of the ids that leave, of those that came, of the columns that came home."""
        options, size = self.options, self.homes.size
        own = self.tables[self.home]
        leaving = [
            part * options.tables + table
            for tables in self.tables
            for part in range(size)
            for table in tables
        ]
        identity = list(range(size * options.tables))
        self.leaving = None if leaving == identity else torch.tensor(leaving, dtype=torch.int32)
        place = {table: index for index, table in enumerate(own)}
        self.arriving = torch.tensor(
            [
                source * len(own) + place[table]
                for table, *_ in self.homes.blocks[self.home]
                for source in range(options.ranks)
            ],
            dtype=torch.int32,
        )
        self.sent_lengths = [len(tables) * options.batch for tables in self.tables for _ in range(size)]
        self.block_sizes = torch.full((options.tables,), self.part_rows, dtype=torch.int64)
        self._plan_columns()

    def _plan_columns(self) -> None:
        """The place of every block in the output, in the order in which blocks come home."""
        blocks = [block for home in self.homes.blocks for block in home]
        self.dims = [stop - start for _, start, stop in blocks]
        self.order = sorted(range(len(blocks)), key=lambda index: blocks[index])
        self.back = sorted(range(len(blocks)), key=lambda index: self.order[index])

    def step(self, ids: Tensor, lengths: Tensor, gradient: Tensor) -> Tensor:
        """One training step.

        Args:
            ids: ``[N]`` int64, table by table, bag by bag.
            lengths: ``[T * B]`` int32.
            gradient: ``[B, T * D]``, of the output; averaged over the ranks.

        Returns:
            ``[B, T * D]``.
        """
        arrived = self.exchange_ids(*self.cut(ids, lengths))
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(arrived[1])
        sums = self.tbe(arrived[0], offsets)
        output = self.results_home(sums.detach())
        sums.backward(self.gradients_out(gradient))
        return output

    def cut(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Ids by the rank that has their rows, local there; ``[home, part, table, bag]``."""
        if self.homes.size > 1:
            cut = torch.ops.fbgemm.block_bucketize_sparse_features(
                lengths, ids, False, False, self.block_sizes, self.homes.size
            )
            lengths, ids = cut[0], cut[1]
        if self.leaving is None:
            return ids, lengths
        rows = lengths.view(self.homes.size * self.options.tables, self.options.batch)
        permuted = torch.ops.fbgemm.permute_2D_sparse_data(self.leaving, rows, ids, None, None)
        return permuted[1], permuted[0].view(-1)

    def exchange_ids(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Collectives 1 and 2: lengths, then ids; returns both table by table, source by source."""
        own = len(self.tables[self.home])
        arrived = lengths.new_empty(self.options.ranks * own * self.options.batch)
        counts = [own * self.options.batch] * self.options.ranks
        dist.all_to_all_single(arrived, lengths, counts, self.sent_lengths)
        sent = [int(piece.sum()) for piece in lengths.split(self.sent_lengths)]
        received = arrived.view(self.options.ranks, -1).sum(1).tolist()
        their_ids = ids.new_empty(sum(received))
        dist.all_to_all_single(their_ids, ids, received, sent)
        permuted = torch.ops.fbgemm.permute_2D_sparse_data(
            self.arriving, arrived.view(self.options.ranks * own, self.options.batch), their_ids, None, None
        )
        return permuted[1], permuted[0].view(-1)

    def results_home(self, sums: Tensor) -> Tensor:
        """Collective 3, partial sums ``[W * B, C]`` to be added at home, and with several homes one more across.

        Over gloo an all-to-all and a sum take half the time of its reduce-scatter.
        """
        number, size, batch = len(self.homes.blocks), self.homes.size, self.options.batch
        if self.neighbours is not None:
            by_local = (
                sums if number == 1 else sums.view(number, size, batch, -1).transpose(0, 1).contiguous()
            )
            partial = torch.empty_like(by_local).view(-1)
            dist.all_to_all_single(partial, by_local.view(-1), group=self.neighbours)
            sums = partial.view(size, number * batch, -1).sum(0)
        if self.counterparts is None:
            return self._in_order(sums.view(batch, -1).split(self.dims, 1), sums)
        sizes = [batch * width for width in self.widths]
        home = sums.new_empty(sum(sizes))
        own = [batch * self.widths[self.home]] * number
        dist.all_to_all_single(home, sums.reshape(-1), sizes, own, group=self.counterparts)
        regions = [region.view(batch, -1) for region in home.split(sizes)]
        dims = [[stop - start for _, start, stop in blocks] for blocks in self.homes.blocks]
        pieces = [piece for region, own in zip(regions, dims, strict=True) for piece in region.split(own, 1)]
        return self._in_order(pieces)

    def _in_order(self, pieces: Sequence[Tensor], whole: Tensor | None = None) -> Tensor:
        """The blocks' columns in the order of the tables; ``whole`` where they stand so already."""
        if whole is not None and self.order == sorted(self.order):
            return whole
        return torch.cat([pieces[index] for index in self.order], 1)

    def gradients_out(self, gradient: Tensor) -> Tensor:
        """The last collectives: each home's columns to its ranks; returns ``[W * B, C]``."""
        number, size, batch = len(self.homes.blocks), self.homes.size, self.options.batch
        gradient = gradient / self.options.ranks
        if self.counterparts is not None:
            gradient = self._across(gradient)
        if self.neighbours is None:
            return gradient.view(number * batch, -1)
        gradient = gradient.reshape(-1)
        gathered = gradient.new_empty(size * gradient.numel())
        dist.all_gather(list(gathered.split(gradient.numel())), gradient, group=self.neighbours)
        by_local = gathered.view(size, number, batch, -1)
        return by_local.transpose(0, 1).reshape(number * size * batch, -1)

    def _across(self, gradient: Tensor) -> Tensor:
        """Each home's columns of the gradient to this rank's counterpart there."""
        batch, number = self.options.batch, len(self.homes.blocks)
        dims = [self.dims[index] for index in self.order]
        columns = gradient.split(dims, 1)
        by_home, start = [], 0
        for blocks in self.homes.blocks:
            own = [columns[self.back[index]] for index in range(start, start + len(blocks))]
            by_home.append(torch.cat(own, 1).view(-1))
            start += len(blocks)
        arrived = gradient.new_empty(number * batch * self.widths[self.home])
        own_sizes = [batch * self.widths[self.home]] * number
        sizes = [batch * width for width in self.widths]
        dist.all_to_all_single(arrived, torch.cat(by_home), own_sizes, sizes, group=self.counterparts)
        return arrived


def batch_of(options: argparse.Namespace, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Ids and lengths of a rank's batch, the same whoever asks."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    num_bags = options.tables * options.batch
    ids = torch.randint(0, options.rows, (num_bags * options.ids,), generator=generator)
    return ids, torch.full((num_bags,), options.ids, dtype=torch.int32)


def time_steps(loop: LeanLoop, options: argparse.Namespace) -> list[float]:
    """Seconds of each timed step; every step begins at a barrier."""
    batches = [batch_of(options, loop.rank, number) for number in range(NUM_BATCHES)]
    gradient = torch.rand(options.batch, options.tables * options.dim)
    seconds = []
    for number in range(-NUM_BATCHES, options.steps):
        dist.barrier()
        start = time.perf_counter()
        loop.step(*batches[number % NUM_BATCHES], gradient)
        if number >= 0:
            seconds.append(time.perf_counter() - start)
    return seconds


def num_collectives(loop: LeanLoop) -> int:
    """Of one step: two for ids; home and back, one each inside a home and one each across."""
    ways = (loop.neighbours is not None) + (loop.counterparts is not None)
    return 2 + 2 * ways


def check(loop: LeanLoop, options: argparse.Namespace) -> None:
    """Compare a step with tables that are not sharded, on every rank.

    Raises:
        AssertionError: results or updated weights differ.
    """
    tables = torch.rand(options.tables, options.rows, options.dim, generator=torch.Generator().manual_seed(7))
    first = loop.local * loop.part_rows
    blocks = loop.homes.blocks[loop.home]
    for (table, start, stop), weight in zip(blocks, loop.tbe.split_embedding_weights(), strict=True):
        weight.copy_(tables[table, first : first + weight.shape[0], start:stop])
    gradients = [
        torch.rand(options.batch, options.tables * options.dim, generator=torch.Generator().manual_seed(r))
        for r in range(options.ranks)
    ]
    output = loop.step(*batch_of(options, loop.rank, 0), gradients[loop.rank])
    torch.testing.assert_close(output, unsharded(tables, options, loop.rank))
    gradient = torch.zeros_like(tables)
    for rank in range(options.ranks):
        ids = batch_of(options, rank, 0)[0].view(options.tables, options.batch, options.ids)
        by_table = gradients[rank].view(options.batch, options.tables, options.dim) / options.ranks
        for table in range(options.tables):
            rows = by_table[:, table, None].expand(-1, options.ids, -1).reshape(-1, options.dim)
            gradient[table].index_add_(0, ids[table].reshape(-1), rows)
    states = [state for (state,) in loop.tbe.split_optimizer_states()]
    for (table, start, stop), weight, state in zip(
        blocks, loop.tbe.split_embedding_weights(), states, strict=True
    ):
        own = gradient[table, first : first + weight.shape[0], start:stop]
        # Row-wise Adagrad of the block's own columns, from no state. The first change has no scale, the state has.
        mean_square = own.square().mean(1, keepdim=True)
        torch.testing.assert_close(state.view(-1, 1), mean_square)
        expected = tables[table, first : first + weight.shape[0], start:stop] - RATE * own / (
            mean_square.sqrt() + EPSILON
        )
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


def unsharded(tables: Tensor, options: argparse.Namespace, rank: int) -> Tensor:
    """``[B, T * D]``: the sums of a rank's first batch."""
    ids = batch_of(options, rank, 0)[0].view(options.tables, options.batch, options.ids)
    return torch.cat([tables[table][ids[table]].sum(1) for table in range(options.tables)], 1)


def run_rank(rank: int, options: argparse.Namespace, port: int) -> None:
    """One rank: join, time or check, and tell from rank 0."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    torch.manual_seed(rank)
    loop = LeanLoop(options)
    if options.check:
        check(loop, options)
    seconds = time_steps(loop, options)
    if rank == 0:
        figures = {
            "system": "lean loop",
            **vars(options),
            "median_ms": round(1e3 * statistics.median(seconds), 3),
            "min_ms": round(1e3 * min(seconds), 3),
            "collectives": num_collectives(loop),
        }
        print(json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the options and start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ("table_wise", "row_wise", "table_row_wise", "grid_shard")
    parser.add_argument("--types", choices=known, default="row_wise")
    sizes = {
        "ranks": 2,
        "batch": 1024,
        "tables": 24,
        "rows": 100_000,
        "dim": 64,
        "ids": 10,
        "steps": 25,
        "hosts": 1,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--check", action="store_true", help="compare a step with tables that are not sharded"
    )
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
