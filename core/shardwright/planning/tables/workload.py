"""Workload files: a model's tables, and what is known of how they are used, without the model.

Their form is that of ``documents/schemas/workload.schema.json``; the page ``docs/documents.md`` explains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from shardwright.errors import InvalidInputError
from shardwright.planning.documents import WORKLOAD
from shardwright.planning.tables.caching import CacheParams
from shardwright.planning.tables.codecs import QCommsConfig
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec

_USE = ("pooling_factors", "num_poolings")
_SAME = (
    *("num_embeddings", "embedding_dim", "data_type", "pooling", "is_weighted", "module", "qcomms_config"),
    *("allowed", "update", "max_gradient", "is_frozen"),
)


@frozen
class Workload:
    """Tables, and how they are used.

    Args:
        name: name of the workload.
        tables: tables in the file's order.
        constraints: path of a table -> what the file says of its use.
        batch_size: samples per rank and step, if the file says.

    Example:
        >>> import shardwright as sw
        >>> data = {"name": "shop", "tables": [{"name": "item", "num_embeddings": 1000, "embedding_dim": 16}]}
        >>> workload = sw.Workload.from_data(data)
        >>> workload.tables[0].name, workload.batch_size
        ('item', None)
    """

    name: str
    tables: tuple[TableSpec, ...]
    constraints: Mapping[str, ParameterConstraints]
    batch_size: int | None = None

    @classmethod
    def read(cls, path: str | Path) -> Workload:
        """The workload in a file.

        Raises:
            InvalidInputError: there is no such file, or it is no workload; the text says where.
        """
        data = WORKLOAD.read(path)
        try:
            return cls.from_data(data, Path(path).stem)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from error

    @classmethod
    def from_data(cls, data: Any, name: str = "") -> Workload:
        """The workload in JSON data.

        Raises:
            InvalidInputError: it has another form, or more features than are planned for; the text says where.
        """
        WORKLOAD.check(data)
        tables, constraints = [], {}
        for index, entry in enumerate(data["tables"]):
            table = table_from_data(entry, f"table {index}")
            tables.append(table)
            use = _use(entry)
            if use:
                constraints[table.path] = ParameterConstraints.from_data(
                    use, f"table {index} ({table.path!r})"
                )
        return cls(data.get("name", name), tuple(tables), constraints, data.get("batch_size_per_rank"))

    def constrained(self, constraints: Constraints) -> Constraints:
        """Fill in the user's constraints with what the file says of each table's use."""
        rules = dict(constraints.rules)
        for path, use in self.constraints.items():
            rules[path] = rules[path].filled_from(use) if path in rules else use
        return Constraints(rules)


def _use(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Read the table's use from an entry."""
    use = {name: entry[name] for name in _USE if name in entry}
    if "pooling_factor" in entry and "pooling_factors" not in use:
        use["pooling_factors"] = [entry["pooling_factor"]]
    return use


def table_from_data(entry: Mapping[str, Any], where: str) -> TableSpec:
    """The specification of a table in JSON data, as a workload or a plan document has it.

    Args:
        entry: the data, whose form is known to be right.
        where: names it in messages.

    Raises:
        InvalidInputError: the entry says what cannot be, or contradicts itself.
    """
    fields = {key: entry[key] for key in _SAME if key in entry}
    try:
        if "cache" in entry:
            fields["cache"] = CacheParams.of(entry["cache"])
        if "optimizer" in entry:
            fields["optimizer"] = _optimizer(entry["optimizer"])
        return TableSpec(name=entry["name"], feature_names=_features(entry), **fields)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where} ({entry['name']!r}): {error}") from error


def _features(entry: Mapping[str, Any]) -> tuple[str, ...]:
    names = entry.get("feature_names")
    count = entry.get("num_features", 1 if names is None else len(names))
    if type(count) is not int:
        raise InvalidInputError(f"num_features must be a whole number, got {count!r}")
    if names is None:
        return _feature_names(entry["name"], count)
    if count != len(names):
        raise InvalidInputError(
            f"num_features is {count!r}, and feature_names has {len(names)}: {names!r}; give one of them, or as many "
            "names"
        )
    return tuple(names)


def _optimizer(data: Any) -> OptimizerSpec | None:
    if data is None or isinstance(data, str):
        return data if data is None else OptimizerSpec(data)
    values = dict(data)
    name, rate = values.pop("name"), values.pop("learning_rate", 0.01)
    return OptimizerSpec(name, rate, values)


_OPTIONAL = (
    "is_weighted",
    "module",
    "qcomms_config",
    "allowed",
    "update",
    "max_gradient",
    "is_frozen",
    "cache",
)
_DEFAULTS = TableSpec("", 1, 1)


def table_to_data(table: TableSpec) -> dict[str, Any]:
    """A specification as JSON data: what :func:`table_from_data` reads."""
    pairs = [(name, getattr(table, name)) for name in _OPTIONAL]
    data: dict[str, Any] = {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        **_features_data(table),
        "data_type": str(table.data_type),
        "pooling": table.pooling.value,
        **{name: _plain(value) for name, value in pairs if value != getattr(_DEFAULTS, name)},
    }
    optimizer = table.optimizer
    if optimizer is None:
        data["optimizer"] = None
    elif not optimizer.is_assumed:
        rest = {
            key: list(value) if isinstance(value, tuple) else value for key, value in optimizer.parameters
        }
        data["optimizer"] = {"name": optimizer.name, "learning_rate": optimizer.learning_rate, **rest}
    return data


def _plain(value: Any) -> Any:
    """A field of a specification as JSON data."""
    if isinstance(value, tuple):  # the sharding types that are allowed, with their kernels
        return {name: None if kernels is None else list(kernels) for name, kernels in value}
    if isinstance(value, QCommsConfig):
        return value.to_data()
    return attrs.asdict(value) if attrs.has(type(value)) else value


def _features_data(table: TableSpec) -> dict[str, Any]:
    """The features: how many, where their names follow from the table's."""
    count = len(table.feature_names)
    if table.feature_names == _feature_names(table.name, count):
        return {"num_features": count}
    return {"feature_names": list(table.feature_names)}


def _feature_names(table: str, count: int) -> tuple[str, ...]:
    return tuple(f"{table}_f{index}" for index in range(count))
