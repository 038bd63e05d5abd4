"""Descriptions of a wrong output: the table, the bag, and a likely cause.

Legend: B samples, D columns of all outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.sparse import KeyedJaggedTensor


def explain_output(
    tables: Sequence[tuple[str, int, Sequence[str]]],
    batch: KeyedJaggedTensor,
    actual: Tensor,
    expected: Tensor,
) -> str:
    """The first bag of pooled outputs whose vector is wrong.

    Args:
        tables: the description, columns and features of each table, in the order of outputs.
        batch: features that were looked up.
        actual: ``[B, D]``, what came.
        expected: ``[B, D]``, what the unsharded module gives.

    Returns:
        One sentence, or nothing if the outputs have another shape or none is wrong.
    """
    if actual.shape != expected.shape:
        return ""
    for table, feature, columns in _outputs(tables):
        got, wanted = actual[:, columns], expected[:, columns]
        wrong = ~torch.isclose(got, wanted, rtol=1e-4, atol=1e-5).all(1)
        if wrong.any():
            sample = int(wrong.nonzero()[0])
            num_ids = int(batch[feature].lengths()[sample])
            looks = _looks_like(got[sample], wanted[sample], num_ids)
            return (
                f"table {table}, feature {feature!r}, sample {sample} with {num_ids} ids: got "
                f"{_short(got[sample])}, the unsharded module gives {_short(wanted[sample])}{looks}"
            )
    return ""


def _outputs(tables: Sequence[tuple[str, int, Sequence[str]]]) -> Iterator[tuple[str, str, slice]]:
    start = 0
    for description, dim, features in tables:
        for feature in features:
            yield description, feature, slice(start, start + dim)
            start += dim


def _looks_like(got: Tensor, wanted: Tensor, num_ids: int) -> str:
    """Name a known fault that would give the wrong vector, if there is one."""

    def is_close(other: Tensor) -> bool:
        return torch.allclose(got, other, rtol=1e-3, atol=1e-5)

    if is_close(torch.zeros_like(got)):
        return ": nothing came"
    if num_ids > 1 and is_close(wanted * num_ids):
        return f": {num_ids} times as much, the sum of the bag's rows where their mean was asked"
    if num_ids > 1 and is_close(wanted / num_ids):
        return f": a {num_ids}th of it, the mean of the bag's rows where their sum was asked"
    if is_close(2 * wanted):
        return ": twice as much, rows were counted twice"
    missing = torch.isclose(got, torch.zeros_like(got)) & ~torch.isclose(wanted, torch.zeros_like(got))
    if missing.any():
        return f": nothing came in columns {missing.nonzero().flatten().tolist()}"
    return ""


def _short(vector: Tensor) -> str:
    values = ", ".join(f"{value:.4g}" for value in vector[:4].tolist())
    return f"[{values}{', ...' if len(vector) > 4 else ''}]"
