"""Lookups of quantized tables beside TorchRec's `quant` modules: both in turn, minima of each, one thread.

8 tables of 100 000 x 64, 10 ids a bag; batches of 1 024 and of 1. Of a batch the time is from a fresh
`KeyedJaggedTensor` of tensors to the pooled output.

    python tests/benchmarks/serving/quantized_lookup.py --peer /path/to/python/with/torchrec [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

TABLES, ROWS, DIM, IDS = 8, 100_000, 64, 10
CASES = (("INT8", 1024), ("INT8", 1), ("INT4", 1024), ("INT4", 1))
REPEATS = {1024: 30, 1: 600}
ROUNDS = 3


def model_of_ours(precision: str) -> tuple[Any, Any]:
    """A function that looks a batch up, and the class of batches."""
    import shardwright_serving as serving

    import shardwright as sw

    tables = [
        sw.EmbeddingBagConfig(
            name=f"t{index}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{index}"]
        )
        for index in range(TABLES)
    ]
    return serving.quantize_embeddings(sw.EmbeddingBagCollection(tables), precision), sw.KeyedJaggedTensor


def model_of_torchrec(precision: str) -> tuple[Any, Any]:
    """A function that looks a batch up, and the class of batches."""
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.inference.modules import quantize_embeddings

    tables = [
        EmbeddingBagConfig(
            name=f"t{index}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{index}"]
        )
        for index in range(TABLES)
    ]
    dtype = {"INT8": torch.int8, "INT4": torch.quint4x2}[precision]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("cpu")))
    return quantize_embeddings(model, dtype, inplace=True, output_dtype=torch.float32)[0], KeyedJaggedTensor


def measure(side: str) -> dict[str, float]:
    """Milliseconds of each case, the least of many."""
    import torch

    torch.set_num_threads(1)
    found = {}
    for precision, size in CASES:
        model, batches = (model_of_ours if side == "ours" else model_of_torchrec)(precision)
        keys = [f"f{index}" for index in range(TABLES)]
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randint(ROWS, (TABLES * size * IDS,), generator=generator) for _ in range(8)]
        lengths, best = torch.full((TABLES * size,), IDS, dtype=torch.int32), float("inf")
        with torch.no_grad():
            for number in range(REPEATS[size]):
                start = time.perf_counter()
                model(batches(keys=keys, values=drawn[number % 8], lengths=lengths)).values()
                best = min(best, time.perf_counter() - start)
        found[f"{precision}, batch {size}"] = best * 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", default=sys.executable, help="interpreter that has TorchRec")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        print(json.dumps(measure(asked.side)))
        return
    least: dict[str, dict[str, float]] = {"ours": {}, "torchrec": {}}
    for _ in range(ROUNDS):
        for side, python in (("ours", sys.executable), ("torchrec", asked.peer)):
            output = subprocess.run(
                [python, __file__, "--side", side], capture_output=True, text=True, check=True, timeout=300
            ).stdout
            for case, took in json.loads(output.splitlines()[-1]).items():
                least[side][case] = min(took, least[side].get(case, float("inf")))
    print(f"{'':18}{'TorchRec ms':>12}{'ours ms':>10}{'ratio':>8}")
    for case, took in least["ours"].items():
        peer = least["torchrec"][case]
        print(f"{case:18}{peer:12.3f}{took:10.3f}{took / peer:8.2f}")
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(least, file, indent=1)


if __name__ == "__main__":
    main()
