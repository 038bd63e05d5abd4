"""The ``dense`` kernel: plain torch, gradients visible, the optimizer is the user's."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright_plugins.compute_kernels._optimizers import can_train, state_bytes, weight_bytes

if TYPE_CHECKING:
    from shardwright.contracts.lookup import BlockSpec, Lookup

_STATE_IN_WEIGHTS_TYPE = frozenset({"adagrad"})
"""``torch.optim.Adagrad`` keeps its sums in the weights' type; other optimizers keep float32."""


class Dense(ComputeKernel):
    """Blocks as ordinary parameters with dense gradients, for any optimizer; runs everywhere."""

    name: ClassVar[str] = "dense"
    fuses_optimizer: ClassVar[bool] = False
    takes_ragged_bags: ClassVar[bool] = True

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        return can_train(request.data_type)

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Weights, their gradient, and the optimizer state the user's optimizer will hold."""
        weights = weight_bytes(request, num_rows)
        optimizer = request.optimizer
        is_typed = optimizer is not None and optimizer.name in _STATE_IN_WEIGHTS_TYPE
        state = weights if is_typed else state_bytes(request, num_rows)
        return {"device": 2 * weights + state}

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """Half of FBGEMM's, as TorchRec 1.8 has it for its dense kernel (``kernel_bw_lookup``)."""
        return 0.5

    def group_key(self, request: KernelRequest) -> Hashable:
        """Blocks of one element type and width share a call."""
        return (request.data_type, request.num_columns)

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_plugins.compute_kernels.plain_torch._dense_lookup import DenseLookup

        return DenseLookup(blocks, device=device)
