"""Lookups of an unsharded collection of quantized tables by the compute kernels that are loaded.

Legend: B batch size, N ids, D columns of a table, C columns of all outputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright import (
    Bags,
    Block,
    BlockSpec,
    ComputeKernel,
    JaggedTensor,
    KernelRequest,
    KeyedJaggedTensor,
    Lookup,
    TableSpec,
    UnsupportedError,
)
from shardwright.contracts import NAMED_ONLY
from shardwright.host import host


def preferred_kernel(request: KernelRequest, name: str | None = None) -> ComputeKernel | None:
    """The kernel that serves a request, the preferred of several; ``None`` if none does.

    Args:
        request: request for a whole table, on this machine.
        name: name of a kernel to use instead.

    Raises:
        UnsupportedError: the kernel of that name does not serve the request.
    """
    kernels = host().compute_kernels
    if name is not None:
        kernel = kernels.create(name)
        refusal = _refusal(kernel, request)
        if refusal:
            raise UnsupportedError(f"compute kernel {name!r} cannot look these tables up: {refusal}")
        return kernel
    willing = [kernel for kernel in map(kernels.create, kernels) if kernel.preference != NAMED_ONLY]
    # Of equal preference first those that have formats of their own: they are made for serving.
    willing.sort(key=lambda own: (-own.preference, not own.row_formats, own.name))
    return next((kernel for kernel in willing if not _refusal(kernel, request)), None)


def _refusal(kernel: ComputeKernel, request: KernelRequest) -> str:
    """The reason why a kernel does not serve a request; empty if it does."""
    answer = kernel.refusal_of_rows(request) or kernel.supports(request)
    return "" if answer is True else answer


@frozen(eq=False)
class _Group:
    """The tables of one kernel group.

    Args:
        lookup: lookup of their blocks.
        outputs: numbers of the outputs of its slots.
        features: feature of each.
        dims: columns of each.
        is_matrix: pooled results are ``[B, columns]``; else they stand slot after slot.
    """

    lookup: Lookup
    outputs: list[int]
    features: list[str]
    dims: list[int]
    is_matrix: bool


class KernelLookups:
    """Lookups of whole tables by kernels, made once and called for each batch.

    Args:
        tables: specifications of the tables, in order.
        stored: stored rows of each.
        kernels: kernel of each.

    Attributes:
        stored: stored rows of each table, which the lookups read; those given, unless a kernel keeps rows elsewhere.
        checks_ids: ids that are no rows raise ``IndexError``; else they must be checked before.
    """

    @classmethod
    def of(
        cls, tables: Sequence[TableSpec], stored: Sequence[Tensor], names: Sequence[str | None]
    ) -> KernelLookups | None:
        """Lookups by the kernels that serve the tables; ``None`` if there is none for one of them.

        Args:
            tables: specifications of the tables, in order.
            stored: stored rows of each.
            names: name of each table's kernel; ``None`` for the preferred.

        Raises:
            UnsupportedError: a kernel of that name does not serve its table.
        """
        kernels = [
            preferred_kernel(_request(table, stored[0].device), name)
            for table, name in zip(tables, names, strict=True)
        ]
        found = [own for own in kernels if own is not None]
        return cls(tables, stored, found) if len(found) == len(kernels) else None

    def __init__(
        self, tables: Sequence[TableSpec], stored: Sequence[Tensor], kernels: Sequence[ComputeKernel]
    ) -> None:
        self._features = [feature for table in tables for feature in table.feature_names]
        self._is_pooled, self._is_weighted = tables[0].pooling.value != "NONE", tables[0].is_weighted
        self.stored = list(stored)
        members: dict[Hashable, list[int]] = {}
        for number, (table, own) in enumerate(zip(tables, kernels, strict=True)):
            key = (own.name, own.group_key(_request(table, stored[0].device)))
            members.setdefault(key, []).append(number)
        self._groups = [self._built(kernels[own[0]], own, tables) for own in members.values()]
        self.checks_ids = all(group.lookup.checks_ids for group in self._groups)

    def _built(self, kernel: ComputeKernel, numbers: list[int], tables: Sequence[TableSpec]) -> _Group:
        device, specs = self.stored[0].device, [tables[number] for number in numbers]
        blocks = [
            BlockSpec(
                spec,
                Block(spec.all_rows, spec.all_columns, rank=0),
                _request(spec, device),
                spec.num_features,
            )
            for spec in specs
        ]
        lookup = kernel.build(blocks, device=device)
        for index, number in enumerate(numbers):
            lookup.adopt(index, self.stored[number])
            self.stored[number] = lookup.weight(index).detach()  # some kernels' are parameters
        stops = list(accumulate(spec.num_features for spec in tables))
        outputs = [
            output
            for number in numbers
            for output in range(stops[number] - tables[number].num_features, stops[number])
        ]
        dims = [spec.embedding_dim for spec in specs for _ in spec.feature_names]
        return _Group(
            lookup, outputs, [self._features[output] for output in outputs], dims, kernel.batch_major
        )

    def take(self, features: Any) -> bool:
        """True if features are as kernels take them: present, with one batch size, integers, and weights if need be.

        Others are for plain torch, which serves them or says what is wrong.
        """
        if not isinstance(features, KeyedJaggedTensor) or features.variable_stride_per_key():
            return False
        keys, values = features.keys(), features.values()
        are_there = keys == self._features or all(keys.count(name) == 1 for name in self._features)
        return (
            are_there
            and values.device == self.stored[0].device
            and values.dtype in (torch.int32, torch.int64)
            and (features.weights_or_none() is not None or not self._is_weighted)
            and (self._checks_lengths(keys) or int(features.lengths().sum()) == values.numel())
        )

    def _checks_lengths(self, keys: list[str]) -> bool:
        """True if a kernel gets a batch as it is, and raises where lengths do not add up to its ids."""
        return self.checks_ids and len(self._groups) == 1 and keys == self._features

    def pooled(self, features: KeyedJaggedTensor) -> Tensor:
        """Sums of all bags, ``[B, C]`` float32."""
        size, found = features.stride(), [torch.empty(0)] * len(self._features)
        for group in self._groups:
            own = self._selected(features, group)
            weights = own.weights().float() if self._is_weighted else None
            bags = Bags(own.values().long(), own.lengths().int(), weights, ((size,) * len(group.dims),))
            result = group.lookup.forward(bags, training=False)[0]
            if group.is_matrix and len(self._groups) == 1:
                return result.view(size, sum(group.dims))
            for output, piece in zip(group.outputs, _pieces(result.reshape(-1), group, size), strict=True):
                found[output] = piece
        return torch.cat(found, dim=1)

    def rows(self, features: KeyedJaggedTensor) -> list[tuple[JaggedTensor, Tensor]]:
        """Bags and rows ``[N, D]`` of each output."""
        found: list[Any] = [None] * len(self._features)
        by_feature = features.to_dict()
        for group in self._groups:
            own = self._selected(features, group)
            counts = own.length_per_key()
            bags = Bags(own.values().long(), None, None, np.array([counts], dtype=np.int64))
            result = group.lookup.forward(bags, training=False)[0].reshape(-1)
            pieces = result.split([count * dim for count, dim in zip(counts, group.dims, strict=True)])
            for output, name, piece, dim in zip(
                group.outputs, group.features, pieces, group.dims, strict=True
            ):
                found[output] = (by_feature[name], piece.view(-1, dim))
        return found

    @staticmethod
    def _selected(features: KeyedJaggedTensor, group: _Group) -> KeyedJaggedTensor:
        """The features of a group's slots, in order."""
        keys = features.keys()
        return (
            features
            if keys == group.features
            else features.permute([keys.index(name) for name in group.features])
        )


def _request(table: TableSpec, device: torch.device) -> KernelRequest:
    return KernelRequest.of(table, table.embedding_dim, device=device.type, on_this_machine=True)


def _pieces(result: Tensor, group: _Group, size: int) -> Sequence[Tensor]:
    """Sums of each of a group's outputs, ``[B, D]``."""
    if group.is_matrix:
        return result.view(size, sum(group.dims)).split(group.dims, dim=1)
    rows = result.split([size * dim for dim in group.dims])
    return [own.view(size, dim) for own, dim in zip(rows, group.dims, strict=True)]
