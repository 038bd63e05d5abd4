"""The fitted model: a regressor for each compute kernel and phase, and the file of its measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import shardwright as sw
from shardwright_learned.features import FEATURES
from shardwright_learned.measurements import Measurement

FORMAT = "shardwright-learned-costs"
VERSION = 2
DOCUMENT = sw.DocumentKind("file of learned costs")


@attrs.frozen(eq=False)
class Model:
    """Regressors fitted to measurements.

    Attributes:
        regressor: name of the regressor's class.
        measurements: measurements that they were fitted to.
        fitted: (compute kernel, phase) -> the fitted regressor.
    """

    regressor: str
    measurements: tuple[Measurement, ...]
    fitted: Mapping[tuple[str, str], Any]

    @classmethod
    def fit(cls, measurements: Sequence[Measurement], regressor: Any = None) -> Model:
        """Fit a copy of a regressor for each kernel and each of its phases.

        Args:
            measurements: measurements to fit to.
            regressor: a regressor of scikit-learn. By default a linear one with coefficients above 0: more bytes take
                longer, and it goes on beyond what was measured.

        Raises:
            InvalidInputError: There are no measurements, or a kernel's do not all have the same phases; or the
                regressor is not one of scikit-learn's.
        """
        from sklearn.base import clone
        from sklearn.linear_model import LinearRegression

        chosen = LinearRegression(positive=True) if regressor is None else regressor
        if not all(hasattr(chosen, method) for method in ("fit", "predict", "get_params")):
            raise sw.InvalidInputError(f"the regressor must be one of scikit-learn's, got {chosen!r}")
        if not measurements:
            raise sw.InvalidInputError("there are no measurements to fit to; `measure` makes some")
        fitted = {}
        for kernel in sorted({one.compute_kernel for one in measurements}):
            own = [one for one in measurements if one.compute_kernel == kernel]
            matrix = np.array([[one.features[name] for name in FEATURES] for one in own])
            for phase in _phases(kernel, own):
                times = np.array([one.milliseconds[phase] for one in own])
                fitted[kernel, phase] = clone(chosen).fit(matrix, times)
        return cls(type(chosen).__name__, tuple(measurements), fitted)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that were measured."""
        return tuple(sorted({kernel for kernel, _ in self.fitted}))

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that were measured."""
        return tuple(sorted({phase for _, phase in self.fitted}))

    @property
    def sharding_types(self) -> Mapping[str, tuple[str, ...]]:
        """Sharding type -> the kernels that were measured with it."""
        pairs = sorted({(one.sharding_type, one.compute_kernel) for one in self.measurements})
        return {kind: tuple(kernel for other, kernel in pairs if other == kind) for kind, _ in pairs}

    def predict(self, kernel: str, phase: str, matrix: np.ndarray) -> np.ndarray:
        """Milliseconds of a phase, none below 0: ``[n]`` for features ``[n, len(FEATURES)]``."""
        regressor = self.fitted.get((kernel, phase))
        if regressor is None or not len(matrix):
            return np.zeros(len(matrix))
        return np.maximum(np.asarray(regressor.predict(matrix), dtype=np.float64), 0.0)

    def errors(self) -> Mapping[str, float]:
        """Kernel -> the mean of |predicted - measured| / measured over its measurements, all phases together."""
        found = {}
        for kernel in self.kernels:
            own = [one for one in self.measurements if one.compute_kernel == kernel]
            matrix = np.array([[one.features[name] for name in FEATURES] for one in own])
            predicted = sum(self.predict(kernel, phase, matrix) for phase in self.phases)
            measured = np.array([sum(one.milliseconds.values()) for one in own])
            found[kernel] = float(np.mean(np.abs(predicted - measured) / np.maximum(measured, 1e-9)))
        return found

    def to_json(self) -> str:
        """The file: the measurements."""
        measurements = [attrs.asdict(one) for one in self.measurements]
        return json.dumps({"format": FORMAT, "version": VERSION, "measurements": measurements}, indent=1)

    @classmethod
    def from_json(cls, text: str, regressor: Any = None) -> Model:
        """The model of a file's measurements, to which a regressor is fitted as by :meth:`fit`.

        Raises:
            InvalidInputError: The file is malformed; or what :meth:`fit` raises.
        """
        data = DOCUMENT.parse(text)
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
            raise sw.InvalidInputError(
                f"no file of learned costs: it must have format {FORMAT!r} and version {VERSION}"
            )
        if not isinstance(data.get("measurements"), list):
            raise sw.InvalidInputError("the file of learned costs has no usable measurements")
        return cls.fit([Measurement.from_data(one) for one in data["measurements"]], regressor)


def _phases(kernel: str, own: Sequence[Measurement]) -> list[str]:
    phases = {tuple(sorted(one.milliseconds)) for one in own}
    if len(phases) > 1:
        raise sw.InvalidInputError(f"the measurements of {kernel!r} have different phases: {sorted(phases)}")
    return list(phases.pop())
