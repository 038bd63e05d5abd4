"""The manifest of a package: which inputs its programs take, which outputs they give, and where they are, as JSON.

Nothing here imports torch, nor shardwright.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from attrs import asdict, field, frozen

FORMAT = 1
"""Version of packages that are written and read."""

MANIFEST, ROWS = "package.json", "rows.bin"
FILES: Mapping[str, str] = {"pt2": "model.pt2", "torchscript": "model.pt", "exported": "program.pt2"}
"""Form of a program -> its file, the fastest first."""
FORMS = tuple(FILES)


class PackageError(ValueError):
    """A folder that is no package, or one that cannot be loaded or served."""


@frozen
class Feature:
    """A sparse feature of the input.

    Attributes:
        name: name in requests.
        num_embeddings: number of rows of its table, the smallest of several; ids are below it. None if any id is taken.
        is_weighted: True if each of its ids has a weight.
        is_required: False if a request may leave it out; its bags are then empty.
    """

    name: str
    num_embeddings: int | None
    is_weighted: bool = False
    is_required: bool = True


@frozen
class Dense:
    """The dense input: ``columns`` numbers per sample, under its name among the model's arguments."""

    name: str
    columns: int


@frozen
class Output:
    """An output.

    Attributes:
        name: its name in the model's output.
        shape: its shape, the number of samples first, as None.
    """

    name: str
    shape: tuple[int | None, ...] = ()


@frozen
class Place:
    """A table in the file of rows.

    Attributes:
        start: first of its bytes.
        rows: number of its rows.
        columns: columns of a row.
        data_type: precision of its rows.
    """

    start: int
    rows: int
    columns: int
    data_type: str


@frozen
class Manifest:
    """The inputs, outputs and programs of a package.

    Attributes:
        programs: file of each program by its form: ``pt2``, ``exported`` or ``torchscript``.
        tables: file of the rows of all tables, which the programs take as their last input, if there is one.
        features: sparse features, in the order of the programs' inputs.
        dense: dense input, if there is one.
        outputs: outputs, in the programs' order.
        version: checksum of rows, other weights, operators, inputs and outputs: packages of one version take and
            predict the same.
        rows_bytes: bytes of the file of rows; None if the package does not say.
        precision: precision of each table by its name.
        places: place of each table whose ids are rows, by its path in the model.
        created_with: versions of what made it.
    """

    programs: Mapping[str, str]
    tables: str | None
    features: tuple[Feature, ...]
    dense: Dense | None
    outputs: tuple[Output, ...]
    version: str
    rows_bytes: int | None = None
    precision: Mapping[str, str] = field(factory=dict)
    places: Mapping[str, Place] = field(factory=dict)
    created_with: Mapping[str, str] = field(factory=dict)
    names: Mapping[str, int] = field(init=False, repr=False)

    @names.default
    def _numbered(self) -> dict[str, int]:
        return {feature.name: index for index, feature in enumerate(self.features)}

    @property
    def is_weighted(self) -> bool:
        """True if the programs take weights of ids."""
        return any(feature.is_weighted for feature in self.features)

    def to_json(self) -> str:
        """The manifest as JSON text."""
        data = asdict(self)
        model = {**data.pop("programs"), "tables": data.pop("tables")}
        for feature in data["features"]:
            feature["required"] = feature.pop("is_required")
        del data["names"]
        return json.dumps({"format": FORMAT, "model": model, **data}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a package.

        Args:
            folder: folder of the package.

        Raises:
            PackageError: there is no manifest, or one that is not as the format says.
        """
        path = folder / MANIFEST
        try:
            document = json.loads(path.read_text())
        except FileNotFoundError:
            raise PackageError(f"no package in {folder}: it has no {MANIFEST}") from None
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
            raise ValueError(f"its format is {document['format']!r}; this release reads {FORMAT}")
        dense, model = document.get("dense"), document["model"]
        return cls(
            programs={form: model[form] for form in FORMS if isinstance(model.get(form), str)},
            tables=model.get("tables"),
            features=tuple(_feature(entry) for entry in document["features"]),
            dense=Dense(str(dense["name"]), int(dense["columns"])) if dense else None,
            outputs=tuple(
                Output(str(one["name"]), tuple(one.get("shape", ()))) for one in document["outputs"]
            ),
            version=str(document["version"]),
            rows_bytes=_whole(document.get("rows_bytes")),
            precision=dict(document.get("precision", {})),
            places={path: Place(**place) for path, place in document.get("places", {}).items()},
            created_with=dict(document.get("created_with", {})),
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
