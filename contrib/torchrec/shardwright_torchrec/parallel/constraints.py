"""Constraints as TorchRec reads them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

import shardwright as sw
from shardwright.host import host
from shardwright_torchrec.parallel.sharders import REPLICATED, kernels_with_gradients

__all__ = ["bent"]


def bent(
    constraints: Mapping[str, sw.ParameterConstraints] | None,
) -> dict[str, sw.ParameterConstraints] | None:
    """The constraints as TorchRec reads them.

    A table that may be nothing but replicated takes the kernel that its sharder has for that, whatever fused kernels
    the constraints name: TorchRec's tutorial on sharding does so.
    """
    if constraints is None:
        return None
    return {name: _without_fused(rule) for name, rule in constraints.items()}


def _without_fused(rule: sw.ParameterConstraints) -> sw.ParameterConstraints:
    if rule.sharding_types != (REPLICATED,) or rule.compute_kernels is None:
        return rule
    kernels = host().compute_kernels
    if {kernels.canonical(name) for name in rule.compute_kernels} & set(kernels_with_gradients()):
        return rule
    return attrs.evolve(rule, compute_kernels=None)
