"""Loading of programs and rows, which imports nothing but torch itself, so that a process soon predicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from shardwright_serving.packages.manifest import PackageError
from shardwright_serving.packages.patches import apply_patch, patches_of, read_patch

Program: TypeAlias = Callable[..., Tensor | Sequence[Tensor]]
"""A loaded program: tensors in, tensors out."""


def map_rows(path: Path, num_bytes: int | None = None) -> Tensor:
    """Map a file of rows into memory, with the patches beside it: uint8, read from the disk where it is first used.

    Processes share pages that no patch changes.

    Args:
        path: the file.
        num_bytes: bytes that it must have, where they are known.

    Raises:
        PackageError: it cannot be read, or has another size.
    """
    try:
        rows = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))
    except (OSError, ValueError) as error:
        raise PackageError(f"{path} cannot be mapped: {error}") from error
    # Programs read behind the end of a file that is too short.
    if num_bytes is not None and rows.numel() != num_bytes:
        raise PackageError(
            f"{path} has {rows.numel()} bytes, and its package was written with {num_bytes}: copy the package anew"
        )
    for patch in patches_of(path.parent):
        try:
            apply_patch(rows.numpy(), read_patch(patch))
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise PackageError(
                f"{patch} is no patch, or is damaged: add its increment to the package anew"
            ) from error
    return rows


@contextmanager
def quiet() -> Iterator[None]:
    """A context without torch's notices that TorchScript is deprecated, which it uses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _read_exported(path: Path) -> Program:
    module: Program = torch.export.load(path).module()
    return module


def _read_compiled(path: Path) -> Program:
    # `torch._inductor.aoti_load_package` wraps this loader, and imports Inductor for it, which takes seconds.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    return lambda *tensors: loader.run(list(tensors))


def _read_script(path: Path) -> Program:
    with quiet():
        loaded: Program = torch.jit.load(str(path))
    return loaded


readers: Mapping[str, Callable[[Path], Program]] = {
    "exported": _read_exported,
    "pt2": _read_compiled,
    "torchscript": _read_script,
}
"""Form of a program -> function that loads it."""
