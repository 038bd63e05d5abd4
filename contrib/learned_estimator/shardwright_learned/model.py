"""The fitted model: a regressor for each compute kernel and phase, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import shardwright as sw
from shardwright_learned.features import FEATURES
from shardwright_learned.measurements import Measurement
from shardwright_learned.recipes import from_recipe, to_recipe

FORMAT = "shardwright-learned-costs"
VERSION = 1
DOCUMENT = sw.DocumentKind("file of learned costs")
_TOLERANCE = 1e-6
"""How far a model that was fitted again may be from what it said when it was saved: the order of sums."""


def default_regressor() -> Any:
    """Coefficients above 0: more bytes take longer, and it goes on beyond what was measured."""
    from sklearn.linear_model import LinearRegression

    return LinearRegression(positive=True)


@attrs.frozen(eq=False)
class Model:
    """Regressors fitted to measurements.

    Attributes:
        recipe: the regressor as plain data; all are made from it.
        measurements: measurements that they were fitted to.
        fitted: (compute kernel, phase) -> the fitted regressor.
    """

    recipe: Any
    measurements: tuple[Measurement, ...]
    fitted: Mapping[tuple[str, str], Any]

    @classmethod
    def fit(cls, measurements: Sequence[Measurement], recipe: Any) -> Model:
        """Fit a regressor for each kernel and each of its phases.

        Raises:
            InvalidInputError: There are no measurements, or a kernel's do not all have the same phases.
        """
        if not measurements:
            raise sw.InvalidInputError("there are no measurements to fit to; `measure` makes some")
        fitted = {}
        for kernel in sorted({one.compute_kernel for one in measurements}):
            own = [one for one in measurements if one.compute_kernel == kernel]
            matrix = np.array([[one.features[name] for name in FEATURES] for one in own])
            for phase in _phases(kernel, own):
                times = np.array([one.milliseconds[phase] for one in own])
                fitted[kernel, phase] = from_recipe(recipe).fit(matrix, times)
        return cls(recipe, tuple(measurements), fitted)

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
        return {kernel: _mean_error(*self._totals(kernel)) for kernel in self.kernels}

    def _totals(self, kernel: str) -> tuple[np.ndarray, np.ndarray]:
        own = [one for one in self.measurements if one.compute_kernel == kernel]
        matrix = np.array([[one.features[name] for name in FEATURES] for one in own])
        predicted = sum((self.predict(kernel, phase, matrix) for phase in self.phases), np.zeros(len(own)))
        return predicted, np.array([sum(one.milliseconds.values()) for one in own])

    def _saved_and_again(self, kernel: str, saved: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The times of a kernel's measurements as a file says them, and as the model does."""
        return np.asarray(saved.get(kernel, ()), dtype=np.float64), self._totals(kernel)[0]

    def to_json(self) -> str:
        """The file: recipe, measurements, and what the model says of them."""
        import sklearn

        data = {
            "format": FORMAT,
            "version": VERSION,
            "scikit_learn": sklearn.__version__,
            "regressor": self.recipe,
            "measurements": [one.to_data() for one in self.measurements],
            "milliseconds": {kernel: self._totals(kernel)[0].tolist() for kernel in self.kernels},
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Model:
        """The model of a file, fitted again to its measurements.

        Raises:
            InvalidInputError: The file is malformed, or the model is another than when it was saved.
        """
        data = _read(text)
        try:
            model = cls.fit([Measurement.from_data(one) for one in data["measurements"]], data["regressor"])
            times = {kernel: model._saved_and_again(kernel, data["milliseconds"]) for kernel in model.kernels}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, sw.ShardwrightError):
                raise
            raise sw.InvalidInputError(
                f"the file's regressor, saved with scikit-learn {data['scikit_learn']}, cannot be fitted again, or "
                f"its milliseconds are no lists of numbers: {type(error).__name__}: {error}"
            ) from error
        for kernel, (then, now) in times.items():
            if now.shape != then.shape or not np.allclose(now, then, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise sw.InvalidInputError(
                    f"fitted again, the model of {kernel!r} says other times than when it was saved, with scikit-learn "
                    f"{data['scikit_learn']}. Give the regressor a random_state, or fit and save it with the "
                    "scikit-learn that is installed."
                )
        return model


def _phases(kernel: str, own: Sequence[Measurement]) -> list[str]:
    phases = {tuple(sorted(one.milliseconds)) for one in own}
    if len(phases) > 1:
        raise sw.InvalidInputError(f"the measurements of {kernel!r} have different phases: {sorted(phases)}")
    return list(phases.pop())


def _mean_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.mean(np.abs(predicted - measured) / np.maximum(measured, 1e-9)))


def _read(text: str) -> dict[str, Any]:
    data = DOCUMENT.parse(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise sw.InvalidInputError(
            f"no file of learned costs: it must have format {FORMAT!r} and version {VERSION}"
        )
    kinds = {"regressor": dict, "measurements": list, "milliseconds": dict, "scikit_learn": str}
    wrong = [name for name, kind in kinds.items() if not isinstance(data.get(name), kind)]
    if wrong:
        raise sw.InvalidInputError(f"the file of learned costs has no usable {', '.join(wrong)}")
    return data


def recipe_of(regressor: Any) -> Any:
    """The recipe of a regressor; chance gets a fixed seed, so that a file always gives the same model."""
    chosen = default_regressor() if regressor is None else regressor
    if not (hasattr(chosen, "fit") and hasattr(chosen, "predict") and hasattr(chosen, "get_params")):
        raise sw.InvalidInputError(f"the regressor must be one of scikit-learn's, got {chosen!r}")
    unseeded = [name for name, value in chosen.get_params().items() if _is_seed(name) and value is None]
    if unseeded:
        from sklearn.base import clone

        chosen = clone(chosen).set_params(**dict.fromkeys(unseeded, 0))
    return to_recipe(chosen)


def _is_seed(name: str) -> bool:
    return name.rpartition("__")[2] == "random_state"
