"""The ``fused`` kernel: FBGEMM's table-batched embedding, the optimizer in its backward pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.planning.tables.data_types import DataType
from shardwright_plugins.compute_kernels._optimizers import PARAMETERS, ROW_WISE, can_run, trained_bytes

if TYPE_CHECKING:
    from shardwright.contracts.lookup import BlockSpec, Lookup

# What FBGEMM 1.8's table-batched embedding accepts on each device: its CPU backward knows three optimizers and no
# bfloat16 weights ("not implemented for 'BFloat16'", "Optimizer adam is not supported in CPU mode").
_OPTIMIZERS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"sgd", "adagrad", "row_wise_adagrad"}),
    "cuda": frozenset({"sgd", "adagrad", "row_wise_adagrad", "adam"}),
}
_DATA_TYPES: Mapping[str, frozenset[DataType]] = {
    "cpu": frozenset({DataType.FP32, DataType.FP16}),
    "cuda": frozenset({DataType.FP32, DataType.FP16, DataType.BF16}),
}
_COLUMNS_MULTIPLE = 4  # FBGEMM asserts it: rows are read in vectors of four elements


class Fused(ComputeKernel):
    """All blocks of a rank in one FBGEMM call, forward and backward."""

    name: ClassVar[str] = "fused"
    preference: ClassVar[int] = 1
    batch_major: ClassVar[bool] = True
    takes_ragged_bags: ClassVar[bool] = True

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        return refusal(request) or True

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Weights and optimizer state."""
        return {"device": trained_bytes(request, num_rows)}

    def group_key(self, request: KernelRequest) -> Hashable:
        """Blocks of one element type and optimizer; of one width too, where a row is returned for each id."""
        return fused_key(request)

    def gives_equal_bits(self, request: KernelRequest) -> bool:
        """On CUDA FBGEMM adds up the gradients of more than 1024 equal ids by atomic additions, in any order."""
        return request.device == "cpu"

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_plugins.compute_kernels.fbgemm._fused_lookup import FusedLookup

        return FusedLookup(blocks, device=device)


def fused_key(request: KernelRequest) -> Hashable:
    """Blocks of one key can share a table-batched embedding."""
    return (request.data_type, request.optimizer, None if request.is_pooled else request.num_columns)


def refusal(request: KernelRequest) -> str | None:
    """The reason why FBGEMM's table-batched embedding cannot serve a request, or ``None``."""
    device = request.device
    if device not in _OPTIMIZERS:
        return f"FBGEMM has no table-batched embedding for {device!r}; it has for {', '.join(sorted(_OPTIMIZERS))}"
    if request.optimizer is None:
        return "no optimizer was named to run in the backward pass"
    known = {name: PARAMETERS[name] for name in _OPTIMIZERS[device]}
    answer = can_run(request.optimizer, known, f"FBGEMM on {device}")
    if answer is not True:
        return answer
    if request.data_type not in _DATA_TYPES[device]:
        return f"FBGEMM on {device} does not train {request.data_type} tables"
    if request.num_columns % _COLUMNS_MULTIPLE:
        return (
            f"FBGEMM needs columns in multiples of {_COLUMNS_MULTIPLE}, the block has {request.num_columns}"
        )
    if request.cuts_columns and request.optimizer.name in ROW_WISE:
        return (
            f"{request.optimizer.name!r} on {request.num_columns} of {request.embedding_dim} columns needs the "
            "gradient of whole rows, FBGEMM sees its own columns only"
        )
    return _missing(request)


def _missing(request: KernelRequest) -> str | None:
    if request.on_this_machine:
        from shardwright._fbgemm import available, reason

        return None if available() else f"FBGEMM cannot be used here: {reason()}"
    # A plan for another machine assumes FBGEMM there, except on the CPU, which is this machine's kind.
    if request.device == "cpu" and importlib.util.find_spec("fbgemm_gpu") is None:
        return "FBGEMM is not installed (the package is fbgemm-gpu-cpu)"
    return None
