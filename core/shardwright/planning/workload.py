"""Workload files: a model's tables, and what is known of how they are used, without the model.

``{"name": "...", "tables": [{"name": "t0", "num_embeddings": 1000, "embedding_dim": 64, "num_features": 2,
"pooling_factors": [1.0, 30.0]}, ...], "batch_size_per_rank": 512}``. A table may also have ``pooling_factor`` (of all
its features), ``num_poolings``, ``feature_names``, ``data_type``, ``pooling``, ``is_weighted``, ``module``, and an
``optimizer``: ``{"name": "adam", "learning_rate": 0.01, ...}``, or ``null`` where gradients are to be visible.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from shardwright.errors import InvalidInputError, nearest
from shardwright.planning.caching import CacheParams
from shardwright.planning.constraints import Constraints, ParameterConstraints
from shardwright.planning.optimizers import OptimizerSpec
from shardwright.planning.tables import TableSpec

_USE = ("pooling_factors", "num_poolings")
_SAME = (
    *("num_embeddings", "embedding_dim", "data_type", "pooling", "is_weighted", "module", "qcomms_config"),
    "allowed",
)
_KEYS = (*_USE, *_SAME, "name", "pooling_factor", "num_features", "feature_names", "cache", "optimizer")


@frozen
class Workload:
    """Tables, and how they are used.

    Args:
        name: of the workload.
        tables: in the file's order.
        constraints: path of a table -> what the file says of its use.
        batch_size: samples per rank and step, if the file says.
    """

    name: str
    tables: tuple[TableSpec, ...]
    constraints: Mapping[str, ParameterConstraints]
    batch_size: int | None = None

    @classmethod
    def read(cls, path: Path) -> Workload:
        """The workload in a file.

        Raises:
            InvalidInputError: there is no such file, or it is no workload; the text says where.
        """
        data = read_json(path, "workload")
        if not isinstance(data, Mapping) or not isinstance(data.get("tables"), list):
            raise InvalidInputError(f"{path} is no workload: it must be an object with a list of 'tables'")
        if not data["tables"]:
            raise InvalidInputError(f"{path} is no workload: its list of 'tables' is empty")
        try:
            return cls.from_data(data, path.stem)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from error

    @classmethod
    def from_data(cls, data: Mapping[str, Any], name: str = "") -> Workload:
        """The workload in JSON data."""
        tables, constraints = [], {}
        for index, entry in enumerate(data["tables"]):
            table = table_from_data(entry, f"table {index}")
            _check_spelling(entry, f"table {index} ({table.path!r})")
            tables.append(table)
            use = _use(entry)
            if use:
                constraints[table.path] = ParameterConstraints.from_data(
                    use, f"table {index} ({table.path!r})"
                )
        return cls(str(data.get("name", name)), tuple(tables), constraints, data.get("batch_size_per_rank"))

    def constrained(self, constraints: Constraints) -> Constraints:
        """What a user asks, and what the file says of each table's use where the user says nothing of it."""
        rules = dict(constraints.rules)
        for path, use in self.constraints.items():
            rules[path] = rules[path].filled_from(use) if path in rules else use
        return Constraints(rules)


def read_json(path: Path, what: str) -> Any:
    """The JSON value in a file.

    Raises:
        InvalidInputError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise InvalidInputError(f"cannot read the {what} {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInputError(f"the {what} {str(path)!r} is no JSON: {error}") from error


def _without_repetition(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which no key may stand twice: the first would be lost."""
    pairs = list(pairs)
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise InvalidInputError(
            f"the key {repeated[0]!r} stands twice in one object; put both values into one"
        )
    return dict(pairs)


def _check_spelling(entry: Mapping[str, Any], where: str) -> None:
    """Refuse keys that are nearly ours: what is read over them would be another model. Others are the file's own."""
    for key in entry:
        near = "" if key in _KEYS else nearest(key, _KEYS)
        if near:
            raise InvalidInputError(f"{where} has the key {key!r}, which is not read.{near}")


def _use(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry says of the table's use."""
    use = {name: entry[name] for name in _USE if name in entry}
    if "pooling_factor" in entry and "pooling_factors" not in use:
        use["pooling_factors"] = [entry["pooling_factor"]]
    return use


def table_from_data(entry: Any, where: str) -> TableSpec:
    """The specification of a table in JSON data, as a workload or a plan document has it.

    Raises:
        InvalidInputError: something is missing, or is of the wrong form.
    """
    if not isinstance(entry, Mapping):
        raise InvalidInputError(f"{where} must be an object, got {entry!r}")
    missing = [key for key in ("name", "num_embeddings", "embedding_dim") if key not in entry]
    if missing:
        raise InvalidInputError(f"{where} has no {missing[0]!r}: {entry!r}")
    if not isinstance(entry["name"], str) or not entry["name"]:
        raise InvalidInputError(f"{where}: its name must be a text, got {entry['name']!r}")
    fields = {key: entry[key] for key in _SAME if key in entry}
    if "cache" in entry:
        fields["cache"] = CacheParams.of(entry["cache"])
    if "optimizer" in entry:
        fields["optimizer"] = _optimizer(entry["optimizer"], where)
    names = _features(entry, where)
    try:
        return TableSpec(name=entry["name"], feature_names=names, **fields)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where} ({entry['name']!r}): {error}") from error


def _features(entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
    names = entry.get("feature_names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise InvalidInputError(
            f"{where} ({entry['name']!r}): feature_names must be a list of names, got {names!r}"
        )
    count = entry.get("num_features", 1 if names is None else len(names))
    if names is not None and count != len(names):
        raise InvalidInputError(
            f"{where} ({entry['name']!r}): num_features is {count!r}, and feature_names has {len(names)}: {names!r}; "
            "give one of them, or as many names"
        )
    if names is not None:
        return tuple(names)
    if type(count) is not int or count < 0:
        raise InvalidInputError(
            f"{where} ({entry['name']!r}): num_features must be a whole number, got {count!r}"
        )
    return _feature_names(entry["name"], count)


def _optimizer(data: Any, where: str) -> OptimizerSpec | None:
    if data is None or isinstance(data, str):
        return data if data is None else OptimizerSpec(data)
    if not isinstance(data, Mapping) or "name" not in data:
        raise InvalidInputError(
            f"{where}: optimizer must be a name, an object with a name, or null; got {data!r}"
        )
    values = dict(data)
    name, rate = values.pop("name"), values.pop("learning_rate", 0.01)
    return OptimizerSpec(name, rate, values)


_DEFAULT_CACHE, _DEFAULT_OPTIMIZER = CacheParams(), OptimizerSpec()


def table_to_data(table: TableSpec) -> dict[str, Any]:
    """A specification as JSON data: what :func:`table_from_data` reads."""
    data: dict[str, Any] = {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        **_features_data(table),
        "data_type": table.data_type.value,
        "pooling": table.pooling.value,
    }
    if table.is_weighted:
        data["is_weighted"] = True
    if table.module:
        data["module"] = table.module
    if table.qcomms_config:
        data["qcomms_config"] = table.qcomms_config.to_data()
    if table.allowed is not None:
        data["allowed"] = {
            name: None if kernels is None else list(kernels) for name, kernels in table.allowed
        }
    if table.cache != _DEFAULT_CACHE:
        data["cache"] = attrs.asdict(table.cache)
    optimizer = table.optimizer
    if optimizer is None:
        data["optimizer"] = None
    elif optimizer != _DEFAULT_OPTIMIZER:
        rest = {
            key: list(value) if isinstance(value, tuple) else value for key, value in optimizer.parameters
        }
        data["optimizer"] = {"name": optimizer.name, "learning_rate": optimizer.learning_rate, **rest}
    return data


def _features_data(table: TableSpec) -> dict[str, Any]:
    """The features: how many, where their names follow from the table's."""
    count = len(table.feature_names)
    if table.feature_names == _feature_names(table.name, count):
        return {"num_features": count}
    return {"feature_names": list(table.feature_names)}


def _feature_names(table: str, count: int) -> tuple[str, ...]:
    return tuple(f"{table}_f{index}" for index in range(count))
