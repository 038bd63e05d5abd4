"""Packages, loaded to predict.

Legend: F features, B samples, N ids of all features.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from shardwright.errors import InvalidInputError, UnknownNameError, nearest
from shardwright.serving.loading import Callee, map_rows, readers
from shardwright.serving.manifest import FORMS, PackageManifest
from shardwright.sparse import KeyedJaggedTensor

__all__ = ["InferencePackage", "load_package"]

PREFERRED = ("pt2", "torchscript", "exported")
"""Forms in the order in which they are taken: the fastest first."""


@frozen(eq=False)
class InferencePackage:
    """A program and the rows that it reads.

    Args:
        manifest: description of inputs and outputs.
        program: the program.
        rows: the mapped rows.
    """

    manifest: PackageManifest
    program: Callee
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
            return tuple(self.program(*inputs, self.rows))

    def predict(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> dict[str, Tensor]:
        """Predict for a batch.

        Args:
            features: batch with the package's features, in any order and among others.
            dense: ``[B, columns]``, if the package has a dense input.

        Returns:
            The outputs by name.

        Raises:
            UnknownNameError: a feature is missing.
            InvalidInputError: the dense input or the weights are missing, or given in vain.
        """
        inputs = [*self._of_features(features), *self._of_dense(dense)]
        names = [output.name for output in self.manifest.outputs]
        return dict(zip(names, self.run(*inputs), strict=True))

    def _of_features(self, features: KeyedJaggedTensor) -> list[Tensor]:
        keys, given = [feature.name for feature in self.manifest.features], features.keys()
        for key in keys:
            if key not in given:
                raise UnknownNameError(f"feature {key!r} is not in the input.{nearest(key, given)}")
        if given != keys:
            features = features.permute([given.index(key) for key in keys])
        inputs = [features.values().long(), features.lengths().long()]
        if any(feature.is_weighted for feature in self.manifest.features):
            return [*inputs, features.weights().float()]
        return inputs

    def _of_dense(self, dense: Tensor | None) -> list[Tensor]:
        wanted = self.manifest.dense
        if (dense is None) != (wanted is None):
            asked = f"takes the dense input {wanted.name!r}" if wanted else "takes no dense input"
            raise InvalidInputError(f"the package {asked}")
        return [] if dense is None else [dense.float()]


def load_package(path: str | os.PathLike[str], form: str | None = None) -> InferencePackage:
    """Load a package that `export_for_inference` wrote; its rows are mapped, and read where they are first used.

    Args:
        path: folder of the package.
        form: ``"pt2"``, ``"torchscript"`` or ``"exported"``; the first of them that the package has by default.

    Raises:
        CheckpointError: there is no package, or its rows cannot be mapped.
        UnknownNameError: the package has no such form.
    """
    folder = Path(path)
    manifest = PackageManifest.read(folder)
    own = [known for known in PREFERRED if manifest.model.get(known)]
    chosen = form or own[0]
    if chosen not in own:
        raise UnknownNameError(
            f"{folder} has no form {chosen!r} of its program; it has {', '.join(own)}.{nearest(chosen, FORMS)}"
        )
    program = readers[chosen](folder / manifest.model[chosen])
    return InferencePackage(manifest, program, map_rows(folder / manifest.model["tables"]))
