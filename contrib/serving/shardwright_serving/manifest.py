"""The manifest of a package: which inputs its programs take, which outputs they give, and where they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from attrs import field, frozen

__all__ = ["FORMAT", "FORMS", "Dense", "Feature", "Manifest", "Output", "PackageError", "state_of"]

FORMAT = 1
"""Version of the manifest that this server reads."""
FILE = "package.json"
FORMS = ("pt2", "torchscript", "exported")
"""Forms of a program, the fastest first."""


class PackageError(ValueError):
    """A folder that is no package, or one that this server cannot serve."""


@frozen
class Feature:
    """A sparse feature of the input.

    Attributes:
        name: name in requests.
        num_embeddings: number of rows of its table; ids are below it. None if any id is taken.
        is_weighted: True if each of its ids has a weight.
        is_required: False if a request may leave it out; its bags are then empty.
    """

    name: str
    num_embeddings: int | None
    is_weighted: bool = False
    is_required: bool = True


@frozen
class Dense:
    """The dense input: ``columns`` numbers per sample."""

    name: str
    columns: int


@frozen
class Output:
    """An output: its name, and its shape behind the batch dimension."""

    name: str


@frozen
class Manifest:
    """The inputs, outputs and programs of a package.

    Attributes:
        programs: file of each program by its form: ``pt2``, ``exported`` or ``torchscript``.
        tables: file of the rows of all tables, which the programs take as their last input, if there is one.
        features: sparse features, in the order of the programs' inputs.
        dense: dense input, if there is one.
        outputs: outputs, in the programs' order.
        version: name of the contents: two packages with the same version are the same.
        rows_bytes: bytes of the file of rows; None if the package does not say.
    """

    programs: Mapping[str, str]
    tables: str | None
    features: tuple[Feature, ...]
    dense: Dense | None
    outputs: tuple[Output, ...]
    version: str
    rows_bytes: int | None = None
    names: Mapping[str, int] = field(init=False, repr=False)

    @names.default
    def _numbered(self) -> dict[str, int]:
        return {feature.name: index for index, feature in enumerate(self.features)}

    @property
    def is_weighted(self) -> bool:
        """True if the programs take weights of ids."""
        return any(feature.is_weighted for feature in self.features)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a package.

        Args:
            folder: folder of the package.

        Raises:
            PackageError: there is no manifest, or one that is not as the format says.
        """
        path = folder / FILE
        try:
            document = json.loads(path.read_text())
        except FileNotFoundError:
            raise PackageError(f"no package in {folder}: it has no {FILE}") from None
        except (OSError, ValueError) as error:
            raise PackageError(f"{path} cannot be read: {error}") from error
        try:
            return cls._of(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PackageError(
                f"{path} is no manifest of a package ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def _of(cls, document: dict[str, Any]) -> Self:
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}; this server reads {FORMAT}")
        dense = document.get("dense")
        return cls(
            programs={
                form: document["model"][form]
                for form in FORMS
                if isinstance(document["model"].get(form), str)
            },
            tables=document["model"].get("tables"),
            features=tuple(_feature(entry) for entry in document["features"]),
            dense=Dense(str(dense["name"]), int(dense["columns"])) if dense else None,
            outputs=tuple(Output(str(entry["name"])) for entry in document["outputs"]),
            version=str(document["version"]),
            rows_bytes=_whole(document.get("rows_bytes")),
        )


def _whole(number: Any) -> int | None:
    return None if number is None else int(number)


def _feature(entry: dict[str, Any]) -> Feature:
    return Feature(
        str(entry["name"]),
        _whole(entry.get("num_embeddings")),
        is_weighted=bool(entry.get("is_weighted", False)),
        is_required=bool(entry.get("required", True)),
    )


def state_of(folder: Path) -> tuple[object, ...]:
    """Identity of what lies in a folder now: it changes with any file of it, and where a link to it moves."""
    resolved = folder.resolve()
    try:
        files = sorted(path for path in resolved.iterdir() if path.is_file())
        stats = [(path.name, path.stat()) for path in files]
    except OSError:  # it is being replaced
        return (str(resolved),)
    return (str(resolved), *((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
