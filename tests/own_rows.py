"""A stranger's row format, the kernel that brings it, and a collection of tables that are stored in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor, nn

import shardwright as sw

SCALE = 4
"""Bytes of a row's scale, a float32 before its codes."""


@frozen
class OwnRows(sw.RowFormat):
    """Codes of a few bits, with a scale for each row: ``value = (code - half) * scale``."""

    name: str  # type: ignore[misc]
    bits: int = 8  # type: ignore[misc]

    @property
    def _half(self) -> int:
        return 2 ** (self.bits - 1)

    def row_bytes(self, num_columns: int) -> int:
        return SCALE + -(-num_columns * self.bits // 8)

    def pack(self, values: Tensor) -> Tensor:
        scale = values.abs().amax(dim=1, keepdim=True) / max(1, self._half - 1)
        codes = (values / scale.clamp(min=1e-30)).round().long() + self._half
        return self._stored(scale, codes)

    def unpack(self, stored: Tensor, num_columns: int) -> Tensor:
        return (self._codes(stored, num_columns) - self._half) * self._scale(stored)

    def columns(self, stored: Tensor, num_columns: int, start: int, stop: int) -> Tensor:
        return self._stored(self._scale(stored), self._codes(stored, num_columns)[:, start:stop])

    def join(self, blocks: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
        codes = [self._codes(block, width) for block, width in zip(blocks, widths, strict=True)]
        return self._stored(self._scale(blocks[0]), torch.cat(codes, dim=1))

    def error_bound(self, stored: Tensor, num_columns: int) -> Tensor:
        return self._scale(stored) / 2

    def _scale(self, stored: Tensor) -> Tensor:
        return stored[:, :SCALE].flatten().view(torch.float32).unsqueeze(1)

    def _stored(self, scale: Tensor, codes: Tensor) -> Tensor:
        per_byte = 8 // self.bits
        padded = nn.functional.pad(codes, (0, -codes.shape[1] % per_byte)).unflatten(1, (-1, per_byte))
        packed = (padded << torch.arange(per_byte) * self.bits).sum(dim=2).to(torch.uint8)
        scales = scale.flatten().contiguous().view(torch.uint8).unflatten(0, (len(scale), SCALE))
        return torch.cat([scales, packed], dim=1)

    def _codes(self, stored: Tensor, num_columns: int) -> Tensor:
        shifts = torch.arange(8 // self.bits) * self.bits
        codes = (stored[:, SCALE:].long().unsqueeze(2) >> shifts) & (2**self.bits - 1)
        return codes.flatten(1)[:, :num_columns]


class OwnLookup(sw.Lookup):
    """Bag by bag."""

    def __init__(self, blocks: Sequence[sw.BlockSpec], rows: sw.RowFormat) -> None:
        self.blocks, self._rows = blocks, rows
        self._stored = [
            torch.zeros(spec.block.num_rows, rows.row_bytes(spec.block.num_columns), dtype=torch.uint8)
            for spec in blocks
        ]

    def forward(self, bags: sw.Bags, *, training: bool) -> tuple[Tensor, Any]:
        block_of_slot = [index for index, spec in enumerate(self.blocks) for _ in range(spec.num_slots)]
        lengths = torch.ones(bags.num_bags) if bags.lengths is None else bags.lengths
        places = list(pairwise([0, *accumulate(map(int, lengths))]))
        weights = torch.ones(len(bags.ids)) if bags.weights is None else bags.weights
        sums, bag = [torch.zeros(0)], 0
        for counts in bags.counts:
            for block, count in zip(block_of_slot, counts, strict=True):
                width = self.blocks[block].block.num_columns
                values = self._rows.unpack(self._stored[block], width)
                for start, stop in places[bag : bag + count]:
                    sums.append((values[bags.ids[start:stop]] * weights[start:stop, None]).sum(0))
                bag += count
        return torch.cat(sums), None

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        raise NotImplementedError

    def weight(self, block: int) -> Tensor:
        return self._stored[block]

    def adopt(self, block: int, weight: Tensor) -> None:
        self._stored[block] = weight


def kernel_of(rows: sw.RowFormat, name: str = "own_rows", preference: int = 5) -> type[sw.ComputeKernel]:
    """A kernel that looks up such rows and no others."""

    class OwnKernel(sw.ComputeKernel):
        row_formats = (rows,)

        def supports(self, request: sw.KernelRequest) -> Literal[True] | str:
            return request.data_type == rows.name or f"it reads {rows.name} alone"

        def memory_bytes(self, request: sw.KernelRequest, num_rows: int) -> dict[str, int]:
            return {"device": num_rows * self.row_bytes(request)}

        def build(self, blocks: Sequence[sw.BlockSpec], *, device: Any) -> sw.Lookup:
            return OwnLookup(blocks, rows)

    OwnKernel.name, OwnKernel.preference = name, preference
    return OwnKernel


class Bringing:
    """A plugin with kernels."""

    def __init__(self, *kernels: type[sw.ComputeKernel]) -> None:
        self._kernels = kernels

    @sw.hookimpl
    def shardwright_compute_kernels(self) -> list[type[sw.ComputeKernel]]:
        return list(self._kernels)


class OwnBags(sw.TableCollection):
    """Pooled tables whose rows are stored in a format; their values are drawn, the same each time."""

    def __init__(
        self, tables: Sequence[sw.EmbeddingBagConfig], rows: sw.RowFormat, device: Any = "cpu"
    ) -> None:
        super().__init__(tables, sw.EmbeddingBagConfig)
        self._tables, self._rows = list(tables), rows
        self.embedding_bags = nn.ModuleDict()
        generator = torch.Generator().manual_seed(5)
        for table in tables:
            values = torch.rand(table.num_embeddings, table.embedding_dim, generator=generator) - 0.5
            held = nn.Module()
            held.register_buffer("weight", rows.pack(values).to(device))
            self.embedding_bags[table.name] = held

    @property
    def tables(self) -> list[sw.EmbeddingBagConfig]:
        return self._tables

    def table_weight(self, table: str) -> Tensor:
        weight = self.embedding_bags[table].weight
        assert isinstance(weight, Tensor)
        return weight

    def of_tables(self, tables: Sequence[Any], device: Any = None) -> OwnBags:
        return OwnBags(tables, self._rows, device)

    def is_weighted(self) -> bool:
        return False

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedTensor:
        def pool(table: Any, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
            values = self._rows.unpack(self.table_weight(table.name), table.embedding_dim)
            mode = "mean" if table.pooling is sw.PoolingType.MEAN else "sum"
            return nn.functional.embedding_bag(ids, values, offsets[:-1], mode=mode)

        dims = [table.embedding_dim for table in self._tables for _ in table.feature_names]
        return sw.KeyedTensor(self.embedding_names(), dims, torch.cat(self.pooled_by(pool, features), dim=1))


class OwnBagsSharder(sw.EmbeddingBagCollectionSharder):
    """Shards :class:`OwnBags`."""

    module_type = OwnBags
