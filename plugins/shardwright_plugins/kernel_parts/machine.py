"""Answers of ``supports()`` that depend on the machine; nothing is imported but what they try."""

from __future__ import annotations

from shardwright._fbgemm import reason as fbgemm_failure
from shardwright_plugins.compute_kernels._compiled import import_failure
from shardwright_plugins.compute_kernels.fused_triton import is_interpreted
from shardwright_plugins.compute_kernels.fused_triton import missing as triton_failure
from shardwright_plugins.compute_kernels.fused_triton import wrong_device as triton_refusal

__all__ = ["fbgemm_failure", "import_failure", "is_interpreted", "triton_failure", "triton_refusal"]
