"""Lookups that hold nothing: an engine over them says what a plan needs before any memory is taken."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwright.contracts.lookup import Lookup
from shardwright.errors import UnsupportedError
from shardwright.modules.embedding_configs import dtype_of
from shardwright.runtime.step.kernel_groups import KernelGroup


class UnbuiltLookup(Lookup):
    """The blocks of a kernel group without their memory; what a model has while its rows move."""

    def __init__(self, group: KernelGroup, device: Any = None) -> None:
        self.blocks = group.blocks

    def weight(self, block: int) -> Tensor:  # noqa: D102 - described in the base class
        spec = self.blocks[block]
        shape = spec.block.num_rows, spec.block.num_columns  # other rows than of floats do not move
        return torch.empty(shape, dtype=dtype_of(spec.table.data_type), device="meta")

    def forward(self, *_: Any, **__: Any) -> NoReturn:  # noqa: D102
        names = ", ".join(repr(spec.table.name) for spec in self.blocks)
        raise UnsupportedError(
            f"the rows of the tables {names} were lost: resharding within max_extra_bytes failed while they moved. "
            "Build the model again and load a checkpoint"
        )

    backward = forward
