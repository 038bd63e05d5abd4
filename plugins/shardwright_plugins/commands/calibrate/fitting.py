"""Constants fitted to experiments: least squares of relative errors, none below 0.

Legend: E experiments, C constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from attrs import frozen

from shardwright.errors import InvalidInputError
from shardwright.planning.arrays import Floats


@frozen
class Fit:
    """Constants, and how far they are from what they were fitted to.

    Args:
        constants: name -> milliseconds a unit, 0 or more.
        errors: predicted over measured less 1, of each experiment: ``[E]``.
    """

    constants: Mapping[str, float]
    errors: Floats

    def to_data(self) -> dict[str, float]:
        """Number of experiments, median and worst error, as JSON data."""
        far = np.abs(self.errors)
        return {
            "experiments": len(far),
            "median_error": round(float(np.median(far)), 4),
            "worst_error": round(float(far.max()), 4),
        }


def fit(
    names: Sequence[str],
    amounts: Mapping[str, Floats],
    took: Floats,
    *,
    least: Mapping[str, float] = MappingProxyType({}),
) -> Fit:
    """Fit constants so that the amounts times them are the times, by non-negative least squares.

    Source: Lawson and Hanson 1974, as in ``scipy.optimize.nnls``. Each experiment counts by its relative error, so that
    short ones count as much as long ones.

    Args:
        names: names of the constants.
        amounts: amounts that they are multiplied by: ``[E]`` each.
        took: measured times, ms: ``[E]``.
        least: lower bounds of constants other than 0, by name.

    Raises:
        InvalidInputError: a time is not above 0.
    """
    from scipy.optimize import nnls

    if not (took > 0).all():
        raise InvalidInputError("an experiment took no time: measure it with more steps")
    matrix = np.stack([amounts[name] / took for name in names], axis=1)
    # Amounts of unlike size: each column is brought to length 1.
    lengths = np.linalg.norm(matrix, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    # What is above the bounds is 0 or more.
    bounds = np.array([least.get(name, 0.0) for name in names])
    above, _ = nnls(matrix / scale, 1 - matrix @ bounds)
    constants = bounds + above / scale
    errors = matrix @ constants - 1
    return Fit(dict(zip(names, constants.tolist(), strict=True)), errors)
