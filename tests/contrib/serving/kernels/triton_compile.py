"""Compiles what ``quant_triton`` would launch on CUDA; see ``tests.plugins.compute_kernels.triton_compile``."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from shardwright_serving.kernels import _triton_lookup
from tests.plugins.compute_kernels.loops import block_spec, draw_batch, draw_sequences
from tests.plugins.compute_kernels.triton_compile import Launch, told

from shardwright_plugins.kernel_parts.by_triton import Tiles

CASES = [
    # precision, dims, pooled, weighted
    ("INT8", (64, 128), True, True),
    ("INT4", (20, 7), True, False),
    ("INT2", (16, 16), False, False),
    ("FP8", (64, 1024), True, True),
    ("FP16", (64, 8), True, False),
]


def launches(case: tuple[Any, ...]) -> list[Launch]:
    """What a lookup in quantized tables would launch."""
    precision, dims, is_pooled, is_weighted = case
    rule: dict[str, Any] = {"data_type": precision, "optimizer": None, "is_frozen": True}
    blocks = [block_spec(5, dim, slots=2, pooling="SUM" if is_pooled else "NONE", **rule) for dim in dims]
    cpu, seen = torch.device("cpu"), list[Launch]()
    lookup = _triton_lookup.QuantTritonLookup(blocks, device=cpu)
    tiles = Tiles.of(torch.device("cuda"), lookup.geometry.num_columns)
    lookup = _triton_lookup.QuantTritonLookup(blocks, device=cpu, tiles=tiles)
    lookup.warps = {"num_warps": tiles.warps}
    batch = (
        draw_batch(blocks, (30, 20), is_weighted=is_weighted)
        if is_pooled
        else draw_sequences(blocks, 2, max_ids=80)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            _triton_lookup,
            "launch",
            lambda kernel, _, __, *args, **consts: seen.append((kernel, args, consts)),
        )
        lookup.forward(batch.as_bags(cpu), training=False)
    return seen


if __name__ == "__main__":
    for line in told(int(sys.argv[1]), launches, CASES[: int(sys.argv[2])]):
        print(json.dumps(line))
