"""Programs of packages, loaded: callables from input tensors to output tensors.

A program takes ``values [N]`` (int64, ids of all features, one feature after the other), ``lengths [F * B]``, then
``weights [N]`` if a feature is weighted, ``dense [B, columns]`` if there is one, and the bytes of the package's file
of rows if it has one. It gives tensors ``[B, ...]``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright_serving.packages.loading import Program, map_rows, readers
from shardwright_serving.packages.manifest import FORMS, Manifest, PackageError
from shardwright_serving.packages.patches import Patch, apply_patch
from shardwright_serving.server.samples import Samples, joined
from shardwright_serving.server.settings import Settings

Answer = list[Any]
"""Outputs of one request as nested lists, in the manifest's order."""


class LoadedProgram:
    """A program that answers requests together.

    Args:
        program: program to call.
        manifest: manifest of its package.
        rows: mapped file of rows, if the package has one.
    """

    def __init__(self, program: Program, manifest: Manifest, rows: Tensor | None = None) -> None:
        self._program = program
        self._manifest = manifest
        self._rows = [] if rows is None else [rows]

    def predict(self, requests: Sequence[Samples]) -> list[Answer]:
        """Answer requests in one call of the program, in order."""
        inputs = [torch.from_numpy(array) for array in joined(requests)]
        with torch.inference_mode():
            outputs = self._program(*inputs, *self._rows)
        tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        counts = [len(request) for request in requests]
        self._check(tensors, sum(counts))
        parted = [[part.tolist() for part in tensor.split(counts)] for tensor in tensors]
        return [list(answer) for answer in zip(*parted, strict=True)]

    def patch(self, patches: Sequence[Patch]) -> None:
        """Take over rows that changed; on the thread that predicts, so that a batch has rows from before or after."""
        for rows, patch in product(self._rows, patches):
            apply_patch(rows.numpy(), patch)

    def warm_up(self) -> None:
        """Answer empty samples, so that the first request finds all compiled and a misfit shows at once."""
        self.predict([self._empty(1)])
        self.predict([self._empty(2), self._empty(1)])

    def _empty(self, count: int) -> Samples:
        manifest = self._manifest
        features = range(len(manifest.features))
        return Samples(
            np.zeros((len(features), count), dtype=np.int64),
            tuple(np.empty(0, dtype=np.int64) for _ in features),
            tuple(np.empty(0, dtype=np.float32) for _ in features) if manifest.is_weighted else (),
            np.zeros((count, manifest.dense.columns), dtype=np.float32) if manifest.dense else None,
        )

    def _check(self, outputs: Sequence[Tensor], samples: int) -> None:
        shapes = [tuple(output.shape) for output in outputs]
        if len(shapes) != len(self._manifest.outputs) or any(shape[:1] != (samples,) for shape in shapes):
            raise PackageError(
                f"the program gave outputs of shapes {shapes} for {samples} samples; the manifest has "
                f"{len(self._manifest.outputs)}, each with a row per sample"
            )


def load_program(folder: Path, manifest: Manifest, settings: Settings) -> LoadedProgram:
    """Load the program of a package that the settings choose.

    Args:
        folder: folder of the package.
        manifest: manifest of the package.
        settings: settings, with the form of the program or a loader.

    Raises:
        PackageError: no form of the program can be loaded, it does not do what the manifest says, or the file of rows
            cannot be read or has another size.
    """
    rows = None if manifest.tables is None else map_rows(folder / manifest.tables, manifest.rows_bytes)
    errors: list[str] = []
    for form, load in _loaders(folder, manifest, settings):
        try:
            loaded = LoadedProgram(load(), manifest, rows)
            loaded.warm_up()
        except Exception as error:  # whatever a program's reader raises: the next form may load
            errors.append(f"{form}: {type(error).__name__}: {error}")
        else:
            return loaded
    told = "; ".join(errors) or f"it has {', '.join(manifest.programs) or 'none'}"
    raise PackageError(f"no program of {folder} can be served ({settings.program}): {told}")


def _loaders(folder: Path, manifest: Manifest, settings: Settings) -> list[tuple[str, Callable[[], Program]]]:
    """List what may be tried, the preferred first."""
    if settings.loader:
        return [("loader", lambda: _named_loader(settings.loader)(folder))]
    forms = FORMS if settings.program == "auto" else (settings.program,)
    found = [(form, folder / manifest.programs[form]) for form in forms if form in manifest.programs]
    return [(form, partial(readers[form], path)) for form, path in found]


def _named_loader(name: str) -> Callable[[Path], Program]:
    module, _, function = name.partition(":")
    loader: Callable[[Path], Program] = getattr(importlib.import_module(module), function)
    return loader
