"""Size of a package beside its tables' rows, and time to the first prediction beside reading the rows from the disk.

    python -m tests.benchmarks.first_prediction --gib 4

A fresh process loads the package and predicts for one sample, after the kernel was asked to forget the file; then it
reads the file from start to end, after the same. Imports are not counted. Rows are zeros, which take as long as others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import shardwright_serving as serving

import shardwright as sw

COLUMNS, TABLES = 64, 8
INT8_ROW_BYTES = COLUMNS + 8  # as packages store them: scale and bias are float32
FORMS = ("torchscript", "pt2")


def batch() -> sw.KeyedJaggedTensor:
    return sw.KeyedJaggedTensor.from_lists({f"f{table}": [[5, 7, 11]] for table in range(TABLES)})


def package(folder: Path, gib: float) -> Path:
    rows = int(gib * 2**30 / TABLES / INT8_ROW_BYTES)
    tables = [
        sw.EmbeddingBagConfig(
            name=f"t{table}",
            num_embeddings=rows,
            embedding_dim=COLUMNS,
            feature_names=[f"f{table}"],
            data_type="INT8",
        )
        for table in range(TABLES)
    ]
    model = serving.QuantEmbeddingBagCollection(tables)
    return serving.export_for_inference(model, batch(), folder / "package", forms=FORMS, check=False)


def forget(path: Path) -> None:
    """Ask the kernel to drop the file's pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_prediction(path: Path, form: str) -> None:
    """Print the seconds of the first prediction, of the second, and of reading the file."""
    rows, features = path / "rows.bin", batch()
    forget(rows)
    start = time.perf_counter()
    loaded = serving.load_package(path, form)
    loaded.predict(features)
    first = time.perf_counter() - start
    start = time.perf_counter()
    loaded.predict(features)
    second = time.perf_counter() - start
    forget(rows)
    start = time.perf_counter()
    with rows.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 24)
        while file.readinto(buffer):
            pass
    read = time.perf_counter() - start
    print(f"| {form} | {first:.2f} | {second * 1e3:.2f} | {read:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="bytes of all rows, GiB")
    parser.add_argument("--of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of:
        first_prediction(Path(options.of[0]), options.of[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        path = package(Path(folder), options.gib)
        sizes = {one.name: one.stat().st_size for one in path.iterdir()}
        rows = int(options.gib * 2**30 / TABLES / INT8_ROW_BYTES) * TABLES
        print(f"rows.bin: {sizes['rows.bin']} bytes for {rows} rows x {COLUMNS} INT8 columns")
        print(f"package: {sum(sizes.values()) / (rows * INT8_ROW_BYTES):.4f} of its rows' bytes, ", end="")
        print(f"{sum(sizes.values()) / (rows * (COLUMNS + 4)):.4f} of those with float16 scale and bias")
        print(
            "| form | first prediction, s | second, ms | reading the rows, s |\n|---|--:|--:|--:|", flush=True
        )
        for form in FORMS:
            command = [sys.executable, "-m", "tests.benchmarks.first_prediction", "--of", str(path), form]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
