"""Constants fitted to experiments: least squares of relative errors, none below 0.

Legend: E experiments, C constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import frozen

from shardwright.errors import InvalidInputError
from shardwright.planning.arrays import Floats


@frozen
class Fit:
    """Constants, and how far they are from what they were fitted to.

    Args:
        constants: name -> milliseconds a unit, 0 or more.
        errors: predicted less measured, as a part of what errors are relative to, of each experiment: ``[E]``.
    """

    constants: Mapping[str, float]
    errors: Floats

    def scaled(self, factor: float, took: Floats) -> Fit:
        """The constants times a factor.

        Args:
            factor: the factor.
            took: measured times, as a part of what errors are relative to: ``[E]``.
        """
        constants = {name: value * factor for name, value in self.constants.items()}
        return Fit(constants, factor * (self.errors + took) - took)

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
    beside: Floats | None = None,
) -> Fit:
    """Fit constants so that the amounts times them are the times, by non-negative least squares.

    Source: Lawson and Hanson 1974, as in ``scipy.optimize.nnls``. Each experiment counts by its relative error, so that
    short ones count as much as long ones: relative to its time or, of a phase, to the time of the whole step.

    Args:
        names: names of the constants.
        amounts: amounts that they are multiplied by: ``[E]`` each.
        took: measured times, ms: ``[E]``.
        beside: times that errors are relative to, ms: ``[E]``; those that were measured by default.

    Raises:
        InvalidInputError: a time is not above 0.
    """
    from scipy.optimize import nnls

    whole = took if beside is None else beside
    if not (whole > 0).all():
        raise InvalidInputError("an experiment took no time: measure it with more steps")
    matrix = np.stack([amounts[name] / whole for name in names], axis=1)
    # Amounts of unlike size: each column is brought to length 1.
    lengths = np.linalg.norm(matrix, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    scaled, _ = nnls(matrix / scale, took / whole)
    constants = scaled / scale
    return Fit(dict(zip(names, constants.tolist(), strict=True)), matrix @ constants - took / whole)


def rounded(value: float) -> float:
    """Four digits: constants are not known better, and documents are read by people."""
    return float(f"{value:.4g}")
