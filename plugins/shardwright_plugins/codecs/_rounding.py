"""Distance of a value from the nearest number of a floating-point type."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def rounding_bound(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbouring numbers of ``dtype`` around each finite value in its range.

    That is ``|x| * eps / 2`` for normal numbers and half the least positive number for others (IEEE 754-2019, 3.3 and
    4.3.1: round to nearest); ``eps`` is the distance from 1 to the next number. What is itself too small for a float32
    is given as the least positive float32.
    """
    import torch

    kind = torch.finfo(dtype)
    least = max(kind.smallest_normal * kind.eps / 2, torch.finfo(torch.float32).smallest_normal * 2**-23)
    return (values.abs() * (kind.eps / 2)).clamp(min=least)
