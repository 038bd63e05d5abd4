"""The ``quant_numba`` kernel: quantized tables on the CPU, compiled by Numba."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright import KernelRequest
from shardwright_plugins.kernel_parts.machine import import_failure
from shardwright_serving.kernels.requests import QuantizedKernel, serving_refusal

if TYPE_CHECKING:
    from shardwright import BlockSpec, Lookup

_LOOPS = "shardwright_serving.kernels._numba_loops"


class QuantNumba(QuantizedKernel):
    """All blocks of a rank in one call of compiled loops, whatever their precisions and widths.

    Rows are read where they are, so that it serves tables that are mapped from a file.
    """

    name: ClassVar[str] = "quant_numba"
    preference: ClassVar[int] = 3
    batch_major: ClassVar[bool] = True

    def supports(self, request: KernelRequest) -> Literal[True] | str:  # noqa: D102 - described in the base class
        return serving_refusal(request, "the Numba kernel", devices=("cpu",)) or _missing(request) or True

    def group_key(self, request: KernelRequest) -> Hashable:
        """All blocks; those of one width, where a row is returned for each id."""
        return None if request.is_pooled else request.num_columns

    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:  # noqa: D102
        from shardwright_serving.kernels._numba_lookup import QuantNumbaLookup

        return QuantNumbaLookup(blocks)


def _missing(request: KernelRequest) -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed (the package is numba)"
    return import_failure(_LOOPS, "Numba") if request.on_this_machine else None
