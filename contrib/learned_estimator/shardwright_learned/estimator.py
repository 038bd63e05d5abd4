"""The estimator `learned`, and the plugin that offers it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import shardwright as sw
from shardwright_learned.features import FEATURES, features_of
from shardwright_learned.measurements import Measurement
from shardwright_learned.model import DOCUMENT, Model

api = 1

FILE_VARIABLE = "LEARNED_COSTS_FILE"
COMPUTE = {"forward_compute", "backward_compute"}
"""Phases that `measure` tells apart and that depend on a rank's speed."""


class LearnedEstimator(sw.Estimator):
    """Milliseconds of each phase, as a regressor learned them from measurements.

    It offers what was measured: sharding types with the kernels that were measured with them. Others can be asked for,
    kernels only if they were measured with some type.

    Args:
        model: the fitted model; by default that of the file that the environment variable `LEARNED_COSTS_FILE` names,
            read when the planner asks.

    Example:
        >>> estimator = LearnedEstimator.load("costs.json")  # doctest: +SKIP
        >>> planner = sw.EmbeddingShardingPlanner(topology, estimator=estimator)  # doctest: +SKIP
    """

    name: ClassVar[str] = "learned"
    depends_on_shape_only: ClassVar[bool] = True

    def __init__(self, model: Model | None = None) -> None:
        self._given = model

    @classmethod
    def fit(cls, measurements: Sequence[Measurement], regressor: Any = None) -> LearnedEstimator:
        """Fit a regressor to measurements.

        Args:
            measurements: measured shards and their times.
            regressor: any regressor of scikit-learn, a pipeline too; by default a linear one with coefficients above 0.
                Trees do not go beyond the largest shard that was measured. Where chance takes part, give it a
                `random_state`, so that the same measurements make the same plan.

        Raises:
            InvalidInputError: There are no measurements, or they do not go together; or the regressor is not one of
                scikit-learn's.
        """
        return cls(Model.fit(measurements, regressor))

    @classmethod
    def load(cls, path: str | Path, regressor: Any = None) -> LearnedEstimator:
        """Fit a regressor, as by `fit`, to the measurements in a file that `save` wrote.

        Raises:
            InvalidInputError: The file is malformed; or what `fit` raises.
        """
        return cls(Model.from_json(DOCUMENT.text(Path(path)), regressor))

    def save(self, path: str | Path) -> None:
        """Write the measurements, as JSON."""
        Path(path).write_text(self.model.to_json())

    @cached_property
    def model(self) -> Model:
        """The fitted model.

        Raises:
            InvalidInputError: None was given, and no file is named.
        """
        if self._given is not None:
            return self._given
        file = os.environ.get(FILE_VARIABLE)
        if not file:
            raise sw.InvalidInputError(
                f"the estimator {self.name!r} has no measurements: give the planner "
                f"estimator=LearnedEstimator.load(FILE), or name the file in the environment variable {FILE_VARIABLE}"
            )
        return Model.from_json(DOCUMENT.text(Path(file)))

    def option_space(self, topology: sw.Topology) -> sw.OptionSpace:
        """The sharding types and kernels that were measured; others must be named in constraints."""
        measured = self.model.sharding_types
        return sw.OptionSpace(
            kernels={name: measured.get(name, ()) for name in sw.host.host().sharding_types.names}
        )

    def estimate(self, options: sw.Options, topology: sw.Topology) -> Mapping[str, np.ndarray]:
        """Milliseconds of each phase, ``[S]``; lookups and updates take theirs over the ranks' speed.

        Raises:
            UnsupportedError: A kernel was asked for that was not measured, or ranks have another speed than 1 and the
                measurements have no phases of lookups and updates.
        """
        self._check_kernels(options)
        if topology.speed != 1 and not COMPUTE & set(self.model.phases):
            raise sw.UnsupportedError(
                f"ranks have the speed {topology.speed:g}, and the estimator {self.name!r} has measurements of the "
                f"phases {', '.join(self.model.phases)}, none of which is lookups or updates alone: measure again"
            )
        columns = features_of(options, topology)
        matrix = np.stack([columns[name] for name in FEATURES], axis=1)
        kernel = options.compute_kernel[options.option]
        times = {phase: np.zeros(options.num_shards) for phase in self.model.phases}
        for code, offered in enumerate(options.compute_kernels):
            of_kernel = kernel == code
            for phase, column in times.items():
                column[of_kernel] = self.model.predict(offered.name, phase, matrix[of_kernel])
        for phase, column in times.items():
            if phase.startswith("backward"):  # nothing goes back to tables that are never updated
                column[options.is_frozen[options.shard_table]] = 0.0
            if phase in COMPUTE:
                column /= topology.speed
        return times

    def provenance(self, options: sw.Options) -> Mapping[str, Any]:
        """Number of measurements, name of the regressor, and its mean error on them."""
        errors = {kernel: round(error, 3) for kernel, error in self.model.errors().items()}
        number = len(self.model.measurements)
        return {"measurements": number, "regressor": self.model.regressor, "mean_error": errors}

    def _check_kernels(self, options: sw.Options) -> None:
        used = {options.compute_kernels[code].name for code in np.unique(options.compute_kernel).tolist()}
        if unmeasured := sorted(used - set(self.model.kernels)):
            raise sw.UnsupportedError(
                f"the estimator {self.name!r} has no measurements of {', '.join(unmeasured)}; it has them of "
                f"{', '.join(self.model.kernels)}. Measure them too, or leave them out of compute_kernels."
            )


@sw.hookimpl
def shardwright_estimators() -> list[type[sw.Estimator]]:
    """The one estimator."""
    return [LearnedEstimator]
