"""Text of the sparse types: values in brackets, bag by bag, long ones abbreviated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Any

from torch import Tensor

# More than these are not printed, only counted.
MAX_ENTRIES = 30
MAX_BAGS = 20
MAX_VALUES = 20


def braces(name: str, entries: Iterable[str], num_entries: int) -> str:
    """`Name({` one entry a line `})`, entries beyond `MAX_ENTRIES` counted; they may be lazy."""
    if not num_entries:
        return f"{name}()"
    shown = list(islice(entries, MAX_ENTRIES))
    if num_entries > MAX_ENTRIES:
        shown.append(f"... ({num_entries - MAX_ENTRIES} more)")
    return f"{name}({{\n    " + ",\n    ".join(shown) + "\n})"


def bags(values: Tensor, offsets: Tensor) -> str:
    """`[[1, 2], [], [3]]`.

    Args:
        values: `[V, ...]`.
        offsets: `[B + 1]`; they need not start at 0.
    """
    bounds = offsets[: MAX_BAGS + 1].tolist()
    shown = [_sequence(values[start:end]) for start, end in pairwise(bounds)]
    return _bracketed(shown, offsets.numel() - 1)


def rows(values: Tensor) -> str:
    """`[[1.0, 2.0], [3.0, 4.0]]`, of a tensor that has its batch first."""
    return _bracketed([_sequence(row) for row in values[:MAX_BAGS]], values.shape[0])


def dtype_name(tensor: Tensor) -> str:
    """`int64` and the like."""
    return str(tensor.dtype).removeprefix("torch.")


def keys(names: Sequence[str]) -> str:
    """`['a', 'b', ... (7 more)]`."""
    return _bracketed([repr(name) for name in names[:MAX_VALUES]], len(names))


def _sequence(values: Tensor) -> str:
    if values.dim() == 0:
        return _number(values.item())
    return _bracketed([_sequence(value) for value in values[:MAX_VALUES]], values.shape[0])


def _bracketed(shown: list[str], count: int) -> str:
    rest = [f"... ({count - len(shown)} more)"] if count > len(shown) else []
    return "[" + ", ".join(shown + rest) + "]"


def _number(number: Any) -> str:
    # Six digits, so that the float32 0.1 does not print as 0.10000000149011612.
    return repr(float(f"{number:.6g}")) if isinstance(number, float) else repr(number)
