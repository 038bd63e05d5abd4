"""The ``fused_triton`` kernel: lookup and fused update on GPUs in Triton, which comes with every CUDA torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import NAMED_ONLY, KernelRequest
from shardwright_plugins.compute_kernels._compiled import import_failure
from shardwright_plugins.compute_kernels._optimizers import (
    PARAMETERS,
    can_run_rule,
    can_train,
    is_plain,
    needs_whole_rows,
    trained_bytes,
)

if TYPE_CHECKING:
    from shardwright.contracts.lookup import BlockSpec, Lookup
    from shardwright.planning.tables.optimizers import OptimizerSpec

_KERNELS = "shardwright_plugins.compute_kernels.fused_triton._kernels"
INTERPRETER_VARIABLE = "TRITON_INTERPRET"
"""Triton's own variable: with 1 its kernels run on the CPU, interpreted, some hundred thousand times slower."""

_WRITTEN = {name: known | {"stochastic_rounding"} for name, known in PARAMETERS.items()}


class FusedTriton(ComputeKernel):
    """All blocks of a rank in one launch, whatever their widths; exact for row-wise optimizers on cut columns.

    Ids are sorted for an update, so a row is read and written once, no sum depends on chance, and the host never waits.
    SGD, Adagrad, row-wise Adagrad and Adam are written in Triton; the rules of all other optimizers run in plain torch,
    on the sums of each row's gradients.
    Halves are rounded to the nearest, or stochastically if the optimizer's parameter ``stochastic_rounding`` is true.
    """

    name: ClassVar[str] = "fused_triton"
    batch_major: ClassVar[bool] = True
    takes_ragged_bags: ClassVar[bool] = True

    @property
    def preference(self) -> int:  # type: ignore[override]  # what it is follows from the environment
        """Below ``fused``'s; interpreted, it is taken only when asked for."""
        return NAMED_ONLY if is_interpreted() else 0

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        return _refusal(request) or True

    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Weights and optimizer state."""
        return {"device": trained_bytes(request, num_rows)}

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """Part of the memory's bandwidth, between those of FBGEMM and plain torch: an assumption, not measured."""
        return 0.75 if request.optimizer is None or is_written(request.optimizer) else 0.5

    def group_key(self, request: KernelRequest) -> Hashable:
        """Blocks of one element type and optimizer; of one width too, where a row is returned for each id.

        An optimizer that is not written in Triton takes blocks of one width, and the same columns of whole rows.
        """
        if request.optimizer is None or is_written(request.optimizer):
            return (request.data_type, request.optimizer, None if request.is_pooled else request.num_columns)
        whole = (request.embedding_dim, request.first_column) if self.needs_whole_rows(request) else None
        return (request.data_type, request.optimizer, request.num_columns, whole)

    def needs_whole_rows(self, request: KernelRequest) -> bool:
        """A row-wise optimizer's value is a mean over all columns of the row."""
        return needs_whole_rows(request)

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_plugins.compute_kernels.fused_triton._lookup import FusedTritonLookup
        from shardwright_plugins.compute_kernels.fused_triton._rule_lookup import RuleTritonLookup

        optimizer = blocks[0].request.optimizer
        assert optimizer is not None  # supports()
        return (FusedTritonLookup if is_written(optimizer) else RuleTritonLookup)(blocks, device=device)


def is_written(optimizer: OptimizerSpec) -> bool:
    """True if an optimizer's update is one of the kernels' own."""
    return is_plain(optimizer, _WRITTEN)


def is_interpreted() -> bool:
    """True if Triton's kernels run on the CPU, interpreted, as ``TRITON_INTERPRET=1`` asks."""
    return os.environ.get(INTERPRETER_VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")


def _refusal(request: KernelRequest) -> str | None:
    if refused := wrong_device(request.device):
        return refused
    if request.optimizer is None:
        return "no optimizer was named to run in the backward pass"
    for answer in (can_run_rule(request, "the Triton kernel"), can_train(request.data_type)):
        if answer is not True:
            return answer
    return missing() if request.on_this_machine else None


def wrong_device(device: str) -> str | None:
    """The reason why Triton's kernels do not run on a type of device, or ``None``."""
    if device == "cuda":
        return "TRITON_INTERPRET is set, so its kernels run on the CPU" if is_interpreted() else None
    if device != "cpu":
        return f"its kernels are written for 'cuda', not for {device!r}"
    if not is_interpreted():
        return f"its kernels are compiled for 'cuda'; on the CPU {INTERPRETER_VARIABLE}=1 interprets them, to test them"
    return None


def missing() -> str | None:
    """The reason why Triton's kernels do not run on this machine, or ``None``."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (the package is triton; torch for CUDA brings it)"
    return import_failure(_KERNELS, "Triton")
