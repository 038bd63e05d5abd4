"""The ``fused_torch`` kernel: the optimizer in the backward pass, in plain torch, for any machine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright_plugins.compute_kernels._optimizers import (
    can_run_rule,
    can_train,
    needs_whole_rows,
    trained_bytes,
)

if TYPE_CHECKING:
    from shardwright.contracts.lookup import BlockSpec, Lookup


class FusedTorch(ComputeKernel):
    """Updates the rows of a batch in the backward pass; any dim, any device, exact on cut columns."""

    name: ClassVar[str] = "fused_torch"
    takes_ragged_bags: ClassVar[bool] = True

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        if request.optimizer is None:
            return "no optimizer was named to run in the backward pass"
        trainable = can_train(request.data_type)
        if trainable is not True:
            return trainable
        return can_run_rule(request, "the plain-torch kernel")

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Weights and optimizer state."""
        return {"device": trained_bytes(request, num_rows)}

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """Half of FBGEMM's: ids are sorted and updated rows pass through memory once more."""
        return 0.5

    def group_key(self, request: KernelRequest) -> Hashable:
        """Blocks of one element type, width and optimizer, which need the same columns of the same whole rows."""
        whole = (request.embedding_dim, request.first_column) if self.needs_whole_rows(request) else None
        return (request.data_type, request.num_columns, request.optimizer, whole)

    def needs_whole_rows(self, request: KernelRequest) -> bool:
        """A row-wise optimizer's value is a mean over all columns of the row."""
        return needs_whole_rows(request)

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_plugins.compute_kernels.plain_torch._fused_torch_lookup import FusedTorchLookup

        return FusedTorchLookup(blocks, device=device)
