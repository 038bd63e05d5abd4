"""Compiles what ``hash_table_triton`` would launch on CUDA; see ``tests.plugins.compute_kernels.triton_compile``.

``python -m tests.contrib.hash_embedding.triton_compile 90`` prints, as JSON, a line for each launch.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch
from shardwright_hash_embedding import triton_search
from tests.plugins.compute_kernels.triton_compile import Launch, compiled


def launches() -> list[Launch]:
    """What putting rows and finding them would launch."""
    seen: list[Launch] = []
    slots, keys, rows = torch.zeros(21, dtype=torch.int32), torch.arange(10), torch.arange(10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            triton_search,
            "launch",
            lambda kernel, _, __, *args, **consts: seen.append((kernel, args, consts)),
        )
        triton_search.put(slots, keys, rows)
        triton_search.find(slots, keys, keys)
    return seen


if __name__ == "__main__":
    for launch in launches():
        made = compiled(launch, int(sys.argv[1]))
        swaps = [line.split()[-5:] for line in made.asm["ptx"].splitlines() if ".cas." in line]
        line = {
            "kernel": launch[0].__name__,
            "has_machine_code": len(made.asm.get("cubin", b"")) > 0,
            "swaps": len(swaps),
        }
        print(json.dumps(line))
