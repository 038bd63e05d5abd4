"""Demands of a user on a table: allowed sharding types and kernels, and the use of its features."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase, translate
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from attrs import field, frozen

from shardwright.arguments import (
    NonNegativeInt,
    PositiveInt,
    Within,
    check,
    listed,
    not_empty,
    real,
    typed,
    whole,
)
from shardwright.errors import InvalidInputError, UnknownNameError, UnknownPluginError, nearest
from shardwright.planning.documents import CONSTRAINTS
from shardwright.planning.documents.limits import MOST_RATE, MOST_SAMPLES
from shardwright.planning.tables.caching import CacheParams
from shardwright.planning.tables.codecs import QCommsConfig, as_qcomms
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.text import count_text

if TYPE_CHECKING:
    from shardwright.host.registry import Registry


def _plain_names(values: Iterable[str | Enum] | None) -> tuple[str, ...] | None:
    """Names, or members of an enumeration whose ``value`` is the name."""
    return None if values is None else tuple(getattr(value, "value", value) for value in listed(values))


def _floats(values: Iterable[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(real, listed(values)))


def _whole_numbers(values: Iterable[int] | None) -> tuple[int, ...] | None:
    numbers = _floats(values)
    return numbers and tuple(  # type: ignore[return-value]
        int(number) if isinstance(number, float) and number.is_integer() else number for number in numbers
    )


def _ranks(values: int | Iterable[int] | None) -> tuple[int, ...] | None:
    """Ranks in ascending order; one number stands for itself."""
    if values is None:
        return None
    return tuple(
        sorted({whole(rank) for rank in ([values] if isinstance(values, Integral) else listed(values))})
    )


def _labels(values: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """One label or several."""
    return _plain_names([values] if isinstance(values, str) else values)


def _cache(value: CacheParams | Mapping[str, Any] | None) -> CacheParams | None:
    return CacheParams.of(value)  # type: ignore[no-any-return]


@frozen(cache_hash=True, field_transformer=typed)
class ParameterConstraints:
    """Demands on one table, or on all tables that a pattern matches.

    There is no field that the planner does not use.

    Args:
        sharding_types: the sharding types allowed; all by default.
        compute_kernels: the compute kernels allowed, the preferred first; by default every kernel that
            supports the table and applies its optimizer in the backward pass.
        min_partition: the fewest columns a block may have, where columns are cut.
        pooling_factors: ids per bag of each feature, on average, 0 where bags are always empty; one number stands for
            every feature. 1 by default.
        num_poolings: bags per sample of each feature, above 0; one number stands for every feature. 1 by default.
        batch_sizes: samples per rank and step of each feature, 1 or more; the planner's batch size by default.
        is_weighted: true if ids carry weights; as the module says by default.
        cache_params: the cache on the device, should the table be kept in host memory; as ``fused_params`` say by
            default.
        device_group: type of the device that must hold the table; planning fails if no rank of the topology has it.
        qcomms_config: the codecs that its results and gradients travel by; those of its module's sharder by default.
        extras: JSON data for plugins, which tell what they read here (measured access counts, say).
        ranks: the ranks that its shards may live on, one or several; all by default.
        together: a label. All tables with one label go to one rank, each in one piece.
        apart: labels, one or several. No two tables that have a label in common have shards on one rank.

    Raises:
        InvalidInputError: a value is of the wrong form.

    Example:
        >>> import shardwright as sw
        >>> rule = sw.ParameterConstraints(ranks=1, pooling_factors=[20.0])
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), constraints={"user_*": rule})
        >>> plan = planner.plan_tables([sw.TableSpec("user_id", num_embeddings=1000, embedding_dim=8)])
        >>> plan.plan[""]["user_id"].ranks
        [1]
    """

    sharding_types: tuple[str, ...] | None = field(default=None, converter=_plain_names, validator=not_empty)
    compute_kernels: tuple[str, ...] | None = field(default=None, converter=_plain_names, validator=not_empty)
    min_partition: PositiveInt | None = field(default=None, converter=whole)
    pooling_factors: tuple[Annotated[float, Within(ge=0, le=MOST_RATE)], ...] | None = field(
        default=None, converter=_floats, validator=not_empty
    )
    num_poolings: tuple[Annotated[float, Within(gt=0, le=MOST_RATE)], ...] | None = field(
        default=None, converter=_floats, validator=not_empty
    )
    batch_sizes: tuple[Annotated[int, Within(ge=1, le=MOST_SAMPLES)], ...] | None = field(
        default=None, converter=_whole_numbers, validator=not_empty
    )
    is_weighted: bool | None = None
    cache_params: CacheParams | None = field(default=None, converter=_cache)
    device_group: str | None = field(default=None, validator=not_empty)
    ranks: tuple[NonNegativeInt, ...] | None = field(default=None, converter=_ranks, validator=not_empty)
    together: str | None = field(default=None, validator=not_empty)
    apart: tuple[str, ...] | None = field(default=None, converter=_labels, validator=not_empty)
    qcomms_config: QCommsConfig | None = field(default=None, converter=as_qcomms)
    extras: Mapping[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def from_data(cls, data: Mapping[str, Any], where: str) -> ParameterConstraints:
        """The constraints in JSON data: an object of this class's fields, whose form is known to be right.

        Raises:
            InvalidInputError: a value cannot be.
        """
        fields = {name: value for name, value in data.items() if not name.startswith("x-")}
        try:
            return cls(**fields)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from error

    def to_data(self) -> dict[str, Any]:
        """Return the demands as JSON data: an object of the fields that were given."""
        return attrs.asdict(
            self,
            filter=lambda _, value: value is not None,
            value_serializer=lambda _, __, value: list(value) if isinstance(value, tuple) else value,
        )

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields that were given."""
        fields = attrs.asdict(self, recurse=False)
        return tuple(name for name, value in fields.items() if value is not None)

    def filled_from(self, other: ParameterConstraints) -> ParameterConstraints:
        """Fill in the demands of ``other`` where nothing is asked here."""
        missing = {name: getattr(other, name) for name in other.given if getattr(self, name) is None}
        return attrs.evolve(self, **missing) if missing else self

    def per_feature(self, name: str, table: TableSpec, default: float) -> tuple[float, ...]:
        """``pooling_factors``, ``num_poolings`` or ``batch_sizes``, one for each of a table's features.

        Raises:
            InvalidInputError: there are neither as many as features, nor one for all.
        """
        values: tuple[float, ...] = getattr(self, name) or (default,)
        count = self.num_features(table)
        if len(values) == 1:
            return values * count
        if len(values) != count:
            raise InvalidInputError(
                f"constraints for table {table.describe()}: {name} has {count_text(len(values), 'value')}, the table "
                f"has {count_text(count, 'feature')}; give one a feature, or one for all"
            )
        return values

    def applied_to(self, table: TableSpec) -> TableSpec:
        """The table as these ask for it: with their codecs and cache, weighted or not.

        Raises:
            UnknownPluginError: no codec has such a name.
        """
        changes: dict[str, Any] = {"is_weighted": self.is_weighted, "cache": self.cache_params}
        if self.qcomms_config is not None:
            changes["qcomms_config"] = self.qcomms_config.over(table.qcomms_config).resolved()
        given = {name: value for name, value in changes.items() if value is not None}
        return attrs.evolve(table, **given) if given else table

    def num_features(self, table: TableSpec) -> int:
        """The table's features; where its specification names none, as many as values were given."""
        given = (self.pooling_factors, self.num_poolings, self.batch_sizes)
        return table.num_features or max(len(values or (0,)) for values in given)


_NONE = ParameterConstraints()


def _as_dict(rules: Mapping[str, ParameterConstraints] | None) -> Mapping[str, ParameterConstraints]:
    check("constraints", rules, Mapping[str, ParameterConstraints] | None)
    return dict(rules or {})


@frozen(slots=False)
class Constraints:
    """The constraints of all tables, by name or by pattern.

    What a table is asked is put together field by field: from the rule for its path, then for its name, then from the
    patterns that match either, in the order given. So ``"*"`` at the end gives defaults.

    Args:
        rules: table name, path (``module.table``) or pattern (``"user_*"``) -> what is asked.
    """

    rules: Mapping[str, ParameterConstraints] = field(factory=dict, converter=_as_dict)

    @classmethod
    def from_data(cls, data: Any) -> Constraints:
        """The constraints in JSON data: ``{name or pattern: {field: value, ...}, ...}``.

        Raises:
            InvalidInputError: the data is of another form; of fields that there are not, the text has the nearest.
        """
        CONSTRAINTS.check(data)
        return cls(
            {
                key: ParameterConstraints.from_data(value, f"constraints[{key!r}]")
                for key, value in data.items()
                if key != "$schema"
            }
        )

    def to_data(self) -> dict[str, Any]:
        """Return the constraints as JSON data."""
        return {key: rule.to_data() for key, rule in self.rules.items()}

    def check(self, tables: Sequence[TableSpec]) -> None:
        """Check that each rule is for some table.

        Raises:
            UnknownNameError: a key names no table and matches none; the text has the nearest name.
        """
        names = {name for table in tables for name in (table.name, table.path)}
        for key in self.rules:
            if key not in names and not any(fnmatchcase(name, key) for name in names):
                known = ", ".join(sorted({table.name for table in tables})[:10])
                more = f" and {len(tables) - 10} more" if len(tables) > 10 else ""
                raise UnknownNameError(
                    f"constraints[{key!r}] is for no table of the model. Tables: {known}{more}.{nearest(key, names)}",
                    subject=key,
                )

    def check_names(self, sharding_types: Registry[Any], compute_kernels: Registry[Any]) -> None:
        """Check that each name of a sharding type, kernel or codec is known.

        Args:
            sharding_types: the sharding types that are loaded.
            compute_kernels: the compute kernels that are loaded.

        Raises:
            UnknownPluginError: one is not; the text has the rule and the nearest name.
        """
        for key, rule in self.rules.items():
            kinds = ((sharding_types, rule.sharding_types), (compute_kernels, rule.compute_kernels))
            try:
                for registry, name in ((registry, name) for registry, names in kinds for name in names or ()):
                    registry.entry(name)
                if rule.qcomms_config is not None:
                    rule.qcomms_config.resolved()
            except UnknownPluginError as error:
                raise UnknownPluginError(f"constraints[{key!r}]: {error}", **error.facts) from error

    def of(self, table: TableSpec) -> ParameterConstraints:
        """Combine the demands on ``table``."""
        rule = _NONE
        for key in self.keys_of(table):
            rule = rule.filled_from(self.rules[key]) if rule is not _NONE else self.rules[key]
        return rule

    def keys_of(self, table: TableSpec) -> list[str]:
        """The keys of the rules for ``table``, those that prevail first."""
        path, name = table.path, table.name
        keys = [path] if path in self.rules else []
        if name != path and name in self.rules:
            keys.append(name)
        keys += [
            key
            for key, matches in self._patterns
            if key not in keys and (matches(name) is not None or matches(path) is not None)
        ]
        return keys

    @cached_property
    def _patterns(self) -> list[tuple[str, Any]]:
        """The keys that are patterns, with what tells whether a name matches."""
        return [(key, re.compile(translate(key)).match) for key in self.rules if set(key) & set("*?[")]
