"""Rows that changed since a package was written, as patches of its file of rows; nothing here but NumPy.

Legend: N rows of a patch, W bytes of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

PATCHES = "patches"
"""Folder of a package's patches."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]
Patch: TypeAlias = list[tuple[Ints, Bytes]]
"""Of each table, where rows begin in the file of rows: ``[N]``; and the rows: ``[N, W]``."""


def patches_of(package: Path) -> list[Path]:
    """List the patches of a package, in their order."""
    return sorted((package / PATCHES).glob("*.npz"))


def write_patch(package: Path, patch: Iterable[tuple[Ints, Bytes]]) -> Path:
    """Write one more patch of a package, which has its name when all of it is there; one process writes them."""
    folder = package / PATCHES
    folder.mkdir(exist_ok=True)
    numbers = [int(path.stem) for path in patches_of(package)]
    path = folder / f"{max(numbers, default=0) + 1:08}.npz"
    arrays = {name: array for number, own in enumerate(patch) for name, array in _named(number, own)}
    with path.with_suffix(".unfinished").open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # names are those of arrays
    return path.with_suffix(".unfinished").rename(path)


def _named(number: int, own: tuple[Ints, Bytes]) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    yield from zip((f"starts_{number}", f"rows_{number}"), own, strict=True)


def read_patch(path: Path) -> Patch:
    """Read a patch into memory."""
    with np.load(path) as arrays:
        return [(arrays[f"starts_{n}"], arrays[f"rows_{n}"]) for n in range(len(arrays.files) // 2)]


def apply_patch(rows: Bytes, patch: Patch) -> None:
    """Write the rows of a patch where the file of rows is mapped; the file stays as it is.

    Args:
        rows: all bytes of the file.
        patch: the patch.
    """
    for starts, own in patch:
        rows[starts[:, None] + np.arange(own.shape[1])] = own
