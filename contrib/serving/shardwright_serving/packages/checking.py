"""The check of a package: a fresh process loads each form, and compares it with what the model gave.

`python -m shardwright_serving.packages.checking FOLDER DRAWN` is that process.

Legend: F features, B samples, N ids, K ids of a table that have rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardwright import UnsupportedError
from shardwright_serving.packages.manifest import Manifest
from shardwright_serving.packages.package import load_package

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Largest differences of predictions: sums of a thousand float32 in another order differ by less."""

TIMEOUT_S = 600
"""Seconds after which the process that checks is given up: torch's import and three forms take some ten."""

MOST_IDS_OF_A_BAG = 4
SIZES = (1, 2, 7)
"""Samples of the batches that are drawn: none of them the example's in particular, and one alone."""


def drawn_inputs(manifest: Manifest, known: Mapping[str, Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Inputs of a program: drawn batches with empty bags, one without its first feature, and one without ids.

    Args:
        manifest: manifest of its package.
        known: feature whose table has rows of some ids alone -> these, ``[K]`` int64.
    """
    random = torch.Generator().manual_seed(0)
    for size in SIZES:
        lengths = torch.randint(0, MOST_IDS_OF_A_BAG + 1, (len(manifest.features), size), generator=random)
        yield _inputs(manifest, lengths, random, known)
    lengths[0] = 0
    yield _inputs(manifest, lengths, random, known)
    yield _inputs(manifest, torch.zeros_like(lengths), random)


def traced_inputs(manifest: Manifest) -> list[Tensor]:
    """Inputs to trace a program with: three samples with two ids each, since torch tells sizes of 0 and 1 apart."""
    lengths = torch.full((len(manifest.features), 3), 2)
    return _inputs(manifest, lengths, torch.Generator().manual_seed(0))


def _inputs(
    manifest: Manifest,
    lengths: Tensor,
    random: torch.Generator,
    known: Mapping[str, Tensor] | None = None,
) -> list[Tensor]:
    values = []
    for feature, count in zip(manifest.features, lengths.sum(1).tolist(), strict=True):
        own = (known or {}).get(feature.name, torch.zeros(0, dtype=torch.int64))
        if len(own):  # each second id is the next after a known one, which may be unknown
            drawn = own[torch.randint(0, len(own), (count,), generator=random)]
            drawn = drawn + torch.arange(count) % 2
            if feature.num_embeddings is not None:  # a whole table of another collection has it, too
                drawn = drawn.clamp(max=feature.num_embeddings - 1)
            values.append(drawn)
        else:
            values.append(torch.randint(0, feature.num_embeddings or 1, (count,), generator=random))
    inputs = [torch.cat(values), lengths.clone().flatten()]
    if any(feature.is_weighted for feature in manifest.features):
        inputs.append(torch.rand(len(inputs[0]), generator=random))
    if manifest.dense is not None:
        inputs.append(torch.randn(lengths.shape[1], manifest.dense.columns, generator=random))
    return inputs


def check_package(
    folder: Path,
    manifest: Manifest,
    predict: Callable[..., Sequence[Tensor]],
    known: Mapping[str, Tensor] | None = None,
) -> None:
    """Load each form of a package in a fresh process, and compare its predictions on drawn batches.

    Args:
        folder: the package.
        manifest: its manifest.
        predict: function from a program's inputs to what its outputs must be.
        known: feature whose table has rows of some ids alone -> these, ``[K]`` int64.

    Raises:
        UnsupportedError: a form cannot be loaded there, or predicts something else.
    """
    drawn = folder / ".drawn.pt"
    torch.save([(inputs, list(predict(*inputs))) for inputs in drawn_inputs(manifest, known)], drawn)
    command = [sys.executable, "-m", "shardwright_serving.packages.checking", str(folder), str(drawn)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    finally:
        drawn.unlink()
    if done.returncode:
        raise UnsupportedError(f"the package failed its check in a fresh process: {done.stderr[-2000:]}")
    problems = json.loads(done.stdout.splitlines()[-1])
    if problems:
        told = "; ".join(f"{form}: {problem}" for form, problem in problems.items())
        raise UnsupportedError(f"the package failed its check in a fresh process: {told}")


def _problem(folder: Path, form: str, drawn: Path) -> str:
    """The first fault of a form; empty if it has none."""
    try:
        package = load_package(folder, form)
        for inputs, wanted in torch.load(drawn, weights_only=True):
            for found, output in zip(package.run(*inputs), wanted, strict=True):
                # The model itself may give NaN, such as a mean over no ids: then so must the form, at the same places.
                torch.testing.assert_close(found, output, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
    except Exception as error:  # whatever a program raises is its problem
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: str, drawn: str) -> None:
    """Print the problem of each form that has one, as JSON."""
    programs = Manifest.read(Path(folder)).programs
    found = {form: _problem(Path(folder), form, Path(drawn)) for form in programs}
    print(json.dumps({form: problem for form, problem in found.items() if problem}))


if __name__ == "__main__":
    main(*sys.argv[1:])
