"""Packages, loaded to predict.

Legend: F features, B samples, N ids of all features.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from shardwright import InvalidInputError, KeyedJaggedTensor, UnknownNameError
from shardwright_serving.packages.inputs import check_ids
from shardwright_serving.packages.loading import Program, map_rows, readers
from shardwright_serving.packages.manifest import FORMS, Manifest, PackageError


@frozen(eq=False)
class InferencePackage:
    """A program and the rows that it reads.

    Args:
        manifest: description of inputs and outputs.
        program: the program.
        rows: the mapped rows.
    """

    manifest: Manifest
    program: Program
    rows: Tensor

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the program.

        Args:
            inputs: ``values [N]``, ``lengths [F * B]``, both int64, then ``weights [N]`` if ids carry any, and
                ``dense [B, columns]`` if there is one, both float32.

        Returns:
            The outputs in the manifest's order, ``[B, ...]``.
        """
        with torch.inference_mode():
            if inputs[1].numel():
                return tuple(self.program(*inputs, self.rows))
            # Compiled programs take one sample at least.
            return tuple(output[:0] for output in self.program(*self._one_sample(inputs), self.rows))

    def _one_sample(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Inputs of one sample without ids, in place of those of no sample."""
        values, lengths, *others = inputs
        if self.manifest.dense is not None:
            others[-1] = others[-1].new_zeros(1, self.manifest.dense.columns)
        return [values, lengths.new_zeros(len(self.manifest.features)), *others]

    def predict(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> dict[str, Tensor]:
        """Predict for a batch.

        Args:
            features: batch with the package's features, in any order and among others.
            dense: ``[B, columns]``, if the package has a dense input.

        Returns:
            The outputs by name.

        Raises:
            UnknownNameError: a feature is missing.
            InvalidInputError: ids are no integers or no rows, a feature is there twice, features have batch sizes of
                their own, weights are missing, or the dense input is missing, given in vain, or of another shape.
        """
        if not isinstance(features, KeyedJaggedTensor):
            raise InvalidInputError(f"features are a KeyedJaggedTensor, got {type(features).__name__}")
        inputs = [*self._of_features(features), *self._of_dense(dense, features.stride())]
        names = [output.name for output in self.manifest.outputs]
        return dict(zip(names, self.run(*inputs), strict=True))

    def _of_features(self, features: KeyedJaggedTensor) -> list[Tensor]:
        keys, given = [feature.name for feature in self.manifest.features], features.keys()
        for key in keys:
            if key not in given:
                raise UnknownNameError(
                    f"feature {key!r} is not in the input, which has {', '.join(given)}. Send a bag of each sample for "
                    f"each of the package's features, {', '.join(map(repr, keys))}; of one without ids, an empty bag",
                    subject=key,
                    asked=list(given),
                    possible=keys,
                )
        problem = features.lookup_problem(keys)
        if not problem and features.variable_stride_per_key():
            problem = "features have batch sizes of their own: give every feature all samples"
        if problem:
            raise InvalidInputError(f"the package: {problem}")
        if given != keys:
            features = features.permute([given.index(key) for key in keys])
        inputs = [features.values().long(), features.lengths().long()]
        check_ids(self.manifest.features, *inputs)
        if any(feature.is_weighted for feature in self.manifest.features):
            return [*inputs, features.weights().float()]
        return inputs

    def _of_dense(self, dense: Tensor | None, num_samples: int) -> list[Tensor]:
        wanted = self.manifest.dense
        if (dense is None) != (wanted is None):
            asked = f"takes the dense input {wanted.name!r}" if wanted else "takes no dense input"
            raise InvalidInputError(f"the package {asked}")
        if dense is None or wanted is None:
            return []
        if not isinstance(dense, Tensor):
            raise InvalidInputError(
                f"the dense input {wanted.name!r} is a tensor, got a {type(dense).__name__}"
            )
        # Compiled programs take the columns for granted.
        if dense.shape != (num_samples, wanted.columns):
            raise InvalidInputError(
                f"the dense input {wanted.name!r} of {num_samples} samples is [{num_samples}, {wanted.columns}], got "
                f"{list(dense.shape)}"
            )
        return [dense.float().contiguous()]


def load_package(path: str | os.PathLike[str], form: str | None = None) -> InferencePackage:
    """Load a package that `export_for_inference` wrote; its rows are mapped, and read where they are first used.

    Args:
        path: folder of the package.
        form: ``"pt2"``, ``"torchscript"`` or ``"exported"``; the first of them that the package has by default.

    Raises:
        PackageError: there is no package, its program cannot be loaded, its rows cannot be mapped or have another
            size than they were written with, or another package took its place meanwhile.
        UnknownNameError: the package has no such form.
    """
    folder = Path(path)
    manifest = Manifest.read(folder)
    own = [known for known in FORMS if known in manifest.programs]
    if manifest.tables is None or not own:
        raise PackageError(f"{folder} has no rows or no program: it was not written by export_for_inference")
    chosen = form or own[0]
    if chosen not in own:
        raise UnknownNameError(f"{folder} has no form {chosen!r} of its program; it has {', '.join(own)}")
    rows = map_rows(folder / manifest.tables, manifest.rows_bytes)
    path = folder / manifest.programs[chosen]
    try:
        program = readers[chosen](path)
    except Exception as error:  # whatever torch's readers raise
        raise PackageError(f"{path} cannot be loaded: {error}") from error
    if Manifest.read(folder) != manifest:
        raise PackageError(f"{folder} was replaced while it was loaded: load it again")
    return InferencePackage(manifest, program, rows)
