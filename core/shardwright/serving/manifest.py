"""The manifest of a package: programs, inputs, outputs and precisions, as JSON.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from shardwright.errors import CheckpointError

__all__ = [
    "FORMAT",
    "FORMS",
    "MANIFEST",
    "ROWS",
    "PackageDense",
    "PackageFeature",
    "PackageManifest",
    "PackageOutput",
]

FORMAT = 1
"""Version of packages that this library writes and reads."""

MANIFEST = "package.json"
ROWS = "rows.bin"
FORMS: Mapping[str, str] = {"exported": "program.pt2", "pt2": "model.pt2", "torchscript": "model.pt"}
"""Form of a program -> its file."""


@frozen
class PackageFeature:
    """A feature of the input.

    Args:
        name: its name.
        num_embeddings: number of rows of its table, the smallest of several; ids are less.
        is_weighted: its ids carry weights.
    """

    name: str
    num_embeddings: int | None
    is_weighted: bool


@frozen
class PackageDense:
    """The dense input.

    Args:
        name: its name among the model's arguments.
        columns: its columns.
    """

    name: str
    columns: int


@frozen
class PackageOutput:
    """An output.

    Args:
        name: its name in the model's output.
        shape: its shape, the number of samples first, as ``None``.
    """

    name: str
    shape: Sequence[int | None]


@frozen
class PackageManifest:
    """A package's description.

    Args:
        model: form of a program -> its file, and ``tables`` -> the file of rows.
        features: the features in the order of the input.
        dense: the dense input, if there is one.
        outputs: the outputs in order.
        precision: table -> its precision.
        version: checksum of rows, other weights, operators, inputs and outputs: packages of one version take and
            predict the same.
        created_with: versions of what made it.
        rows_bytes: bytes of the file of rows; ``None`` in packages that do not say.
    """

    model: Mapping[str, str]
    features: Sequence[PackageFeature]
    dense: PackageDense | None
    outputs: Sequence[PackageOutput]
    precision: Mapping[str, str]
    version: str
    created_with: Mapping[str, str]
    rows_bytes: int | None = None

    def to_json(self) -> str:
        """The manifest as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> PackageManifest:
        """Read the manifest of a package.

        Raises:
            CheckpointError: there is none, or it is of another format.
        """
        path = folder / MANIFEST
        try:
            document = json.loads(path.read_text())
            if document["format"] != FORMAT:
                raise CheckpointError(
                    f"{path} has the format {document['format']!r}; this library reads {FORMAT}"
                )
            return cls._of(document)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is no manifest of a package: {error!r}") from error

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> PackageManifest:
        return cls(
            document["model"],
            [PackageFeature(**one) for one in document["features"]],
            None if document["dense"] is None else PackageDense(**document["dense"]),
            [PackageOutput(**one) for one in document["outputs"]],
            document["precision"],
            document["version"],
            document["created_with"],
            document.get("rows_bytes"),
        )
