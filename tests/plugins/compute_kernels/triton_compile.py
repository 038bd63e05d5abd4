"""Compiles what Triton's kernels would launch on CUDA, for devices that need not be there; run as a program.

``python -m tests.plugins.compute_kernels.triton_compile 90 1`` compiles the launches of the first cases for compute
capability 9.0 and prints, as JSON, a line for each launch: the kernel's name, the loads and stores of its PTX by width,
and whether there is machine code.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
from attrs import evolve
from tests.plugins.compute_kernels.loops import Batch, block_spec, draw_batch, draw_sequences
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright_plugins.compute_kernels.fused_triton import _kernels as kernels
from shardwright_plugins.compute_kernels.fused_triton._geometry import Tiles
from shardwright_plugins.compute_kernels.fused_triton._lookup import FusedTritonLookup

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
CASES = [
    # optimizer, type of weights, dims, columns of the block, pooled, weighted, stochastic, type of keys
    ("row_wise_adagrad", "FP32", (128, 64), None, True, True, False, torch.int32),
    ("adam", "BF16", (128, 128), None, True, False, True, torch.int32),
    ("adagrad", "FP16", (20, 8), None, False, False, True, torch.int32),
    ("sgd", "FP32", (7, 1024), None, True, False, False, torch.int64),
    ("row_wise_adagrad", "FP16", (256, 256), (64, 128), True, False, False, torch.int64),
    ("adam", "FP16", (1, 1), None, True, True, True, torch.int32),
    ("adagrad", "BF16", (3, 4096), None, True, False, True, torch.int32),
]


def lookup_of(case: tuple[Any, ...]) -> tuple[FusedTritonLookup, Batch]:
    optimizer, data_type, dims, columns, is_pooled, is_weighted, stochastic, key_type = case
    spec = OptimizerSpec(optimizer, 0.1, {"stochastic_rounding": stochastic})
    pooling = "SUM" if is_pooled else "NONE"
    dims = dims if is_pooled else dims[:1]
    blocks = [
        block_spec(5, dim, slots=2, optimizer=spec, data_type=data_type, columns=columns, pooling=pooling)
        for dim in dims
    ]
    cpu = torch.device("cpu")
    lookup = FusedTritonLookup(blocks, device=cpu)
    tiles = evolve(Tiles.of(torch.device("cuda"), lookup.geometry.num_columns), few=0)
    lookup = FusedTritonLookup(blocks, device=cpu, tiles=tiles)
    lookup.warps = {"num_warps": tiles.warps}
    lookup._key_type = key_type
    if is_pooled:
        return lookup, draw_batch(blocks, (30, 20), is_weighted=is_weighted)
    return lookup, draw_sequences(blocks, 2, max_ids=80)


def launches(case: tuple[Any, ...]) -> list[Launch]:
    """What a forward and a backward pass and the gradients of weights would launch, and the update of few ids."""
    seen: list[Launch] = []
    lookup, batch = lookup_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kernels, "launch", lambda kernel, _, __, *args, **consts: seen.append((kernel, args, consts))
        )
        out, saved = lookup.forward(batch.as_bags(torch.device("cpu")), training=True)
        lookup.weight_gradients(saved, out)
        lookup.backward(saved, out)
        lookup.tiles = evolve(lookup.tiles, few=batch.as_bags(torch.device("cpu")).ids.numel())
        lookup.backward(lookup.prepare(batch.as_bags(torch.device("cpu"))), out)
    return seen


def compiled(launch: Launch, capability: int) -> Any:
    """A launch's kernel, compiled as Triton does when it runs for the first time."""
    kernel, args, constants = launch
    options = {name: constants.pop(name) for name in ("num_warps",) if name in constants}
    signature: dict[str, str] = {}
    hints: dict[Any, Any] = {}
    fixed: dict[Any, Any] = {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, [*args, *constants.values()], strict=False)):
        if index < len(args) and isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            if not kernel.params[index].do_not_specialize_on_alignment:
                hints[(index,)] = [["tt.divisibility", 16]]  # as torch allocates
        elif index < len(args) and value is not None:
            signature[name] = "fp32" if isinstance(value, float) else "i32"  # as Triton takes small ones
        else:
            value = value if index < len(args) else constants[name]
            signature[name], fixed[(index,)] = "constexpr", value
    source = ASTSource(kernel, signature, fixed, hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


def accesses(ptx: str) -> dict[str, int]:
    """Loads and stores of global memory, by their width in bits: those of a thread at once."""
    found = re.findall(r"(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    return dict(Counter(f"{kind}{int(vector or 1) * int(bits)}" for kind, vector, bits in found))


def told(
    capability: int, made_by: Callable[[tuple[Any, ...]], list[Launch]], cases: Sequence[tuple[Any, ...]]
) -> Iterator[dict[str, Any]]:
    """A line for each launch of some cases."""
    for number, case in enumerate(cases):
        for launch in made_by(case):
            made = compiled(launch, capability)
            yield {
                "case": number,
                "kernel": launch[0].__name__,
                "accesses": accesses(made.asm["ptx"]),
                "rounds_to_nearest": "cvt.rz" not in made.asm["ptx"],
                "has_machine_code": len(made.asm.get("cubin", b"")) > 0,
            }


if __name__ == "__main__":
    for line in told(int(sys.argv[1]), launches, CASES[: int(sys.argv[2])]):
        print(json.dumps(line))
