"""Demands of a user on a table: allowed sharding types and kernels, and the use of its features."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum
from fnmatch import fnmatchcase, translate
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field, frozen

from shardwright.arguments import brief, typed, whole
from shardwright.errors import InvalidInputError, UnknownNameError, UnknownPluginError, nearest
from shardwright.planning.documents import CONSTRAINTS
from shardwright.planning.documents.limits import MOST_RATE, MOST_SAMPLES
from shardwright.planning.tables.caching import CacheParams
from shardwright.planning.tables.codecs import QCommsConfig, as_qcomms
from shardwright.planning.tables.spec import TableSpec, is_answer

if TYPE_CHECKING:
    from shardwright.host.registry import Registry


def _plain_names(values: Iterable[str | Enum] | None) -> tuple[str, ...] | None:
    """Names, or members of an enumeration whose ``value`` is the name."""
    if values is None:
        return None
    if isinstance(values, str):
        raise InvalidInputError(f"expected a list of names, got the string {values!r}; write [{values!r}]")
    if not isinstance(values, Iterable) or isinstance(values, bytes | Mapping):
        raise InvalidInputError(f"expected a list of names, got {brief(values)}")
    names = tuple(getattr(value, "value", value) for value in values)
    for name in names:
        if not isinstance(name, str) or not name:
            raise InvalidInputError(f"expected a list of names, got {brief(name)} in it")
    if not names:
        raise InvalidInputError(
            "an empty list of names leaves no option; leave the argument out to allow all"
        )
    return tuple(map(str, names))


def _floats(values: Iterable[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(_number(value) for value in _listed(values))


def _whole_numbers(values: Iterable[int] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    numbers = [_number(value) for value in _listed(values)]
    for number in numbers:
        if not number.is_integer():
            raise InvalidInputError(f"expected whole numbers, got {number!r}")
    return tuple(int(number) for number in numbers)


def _listed(values: Any) -> Iterable[Any]:
    if isinstance(values, int | float | str) and not isinstance(values, bool):
        raise InvalidInputError(f"expected a list of numbers, got {values!r}; write [{values!r}]")
    if not isinstance(values, Iterable) or isinstance(values, bytes | Mapping | Set):
        raise InvalidInputError(f"expected a list of numbers, got {brief(values)}")
    return values


def _number(value: Any) -> float:
    if isinstance(value, bool | str):
        raise InvalidInputError(f"expected a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidInputError(f"expected a number, got {brief(value)}") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidInputError(f"expected a finite number, got {value!r}")
    return number


def _ranks(values: int | Iterable[int] | None) -> tuple[int, ...] | None:
    """Ranks in ascending order; one number stands for itself."""
    if values is None:
        return None
    one = whole(values)
    listed = [one] if type(one) is int else [whole(rank) for rank in _listed(values)]
    if isinstance(values, bytes) or not listed or any(type(rank) is not int or rank < 0 for rank in listed):
        raise InvalidInputError(f"ranks must be one rank or several, each a number from 0, got {values!r}")
    return tuple(sorted(set(listed)))


def _labels(values: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """One label or several."""
    return None if values is None else _plain_names([values] if isinstance(values, str) else values)


def _cache(value: CacheParams | Mapping[str, Any] | None) -> CacheParams | None:
    return CacheParams.of(value)


def _is_text(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise InvalidInputError(f"{attribute.name} must be a text, got {value!r}")


def _is_object(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise InvalidInputError(f"{attribute.name} must be an object of JSON data, got {value!r}")


def _up_to(most: int) -> Callable[[Any, Any, tuple[float, ...] | None], None]:
    def check(instance: Any, attribute: Any, values: tuple[float, ...] | None) -> None:
        if values is None:
            return
        if not values or min(values) < 0:
            raise InvalidInputError(
                f"{attribute.name} must be one number a feature, none negative; got {values}"
            )
        if max(values) > most:
            raise InvalidInputError(f"{attribute.name} has {max(values)}; {most} can be planned for")

    return check


def _positive(instance: Any, attribute: Any, value: int | None) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidInputError(f"{attribute.name} must be a positive number of columns, got {value!r}")


@frozen(cache_hash=True, field_transformer=typed)
class ParameterConstraints:
    """Demands on one table, or on all tables that a pattern matches.

    There is no field that the planner does not use.

    Args:
        sharding_types: the sharding types allowed; all by default.
        compute_kernels: the compute kernels allowed, the preferred first; by default every kernel that
            supports the table and applies its optimizer in the backward pass.
        min_partition: the fewest columns a block may have, where columns are cut.
        pooling_factors: ids per bag of each feature, on average; one number stands for every feature. 1 by
            default.
        num_poolings: bags per sample of each feature; one number stands for every feature. 1 by default.
        batch_sizes: samples per rank and step of each feature; the planner's batch size by default.
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

    sharding_types: tuple[str, ...] | None = field(default=None, converter=_plain_names)
    compute_kernels: tuple[str, ...] | None = field(default=None, converter=_plain_names)
    min_partition: int | None = field(default=None, converter=whole, validator=_positive)
    pooling_factors: tuple[float, ...] | None = field(
        default=None, converter=_floats, validator=_up_to(MOST_RATE)
    )
    num_poolings: tuple[float, ...] | None = field(
        default=None, converter=_floats, validator=_up_to(MOST_RATE)
    )
    batch_sizes: tuple[int, ...] | None = field(
        default=None, converter=_whole_numbers, validator=_up_to(MOST_SAMPLES)
    )
    is_weighted: bool | None = field(default=None, validator=is_answer)
    cache_params: CacheParams | None = field(default=None, converter=_cache)
    device_group: str | None = field(default=None, validator=_is_text)
    ranks: tuple[int, ...] | None = field(default=None, converter=_ranks)
    together: str | None = field(default=None, validator=_is_text)
    apart: tuple[str, ...] | None = field(default=None, converter=_labels)
    qcomms_config: QCommsConfig | None = field(default=None, converter=as_qcomms)
    extras: Mapping[str, Any] | None = field(default=None, validator=_is_object, hash=False)

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
        return {name: _as_data(getattr(self, name)) for name in self.given}

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields that were given."""
        return tuple(name for name in _names() if getattr(self, name) is not None)

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
                f"constraints for table {table.describe()}: {name} has {len(values)} values, the table has "
                f"{count} features; give one a feature, or one for all"
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


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(attribute.name for attribute in attrs.fields(ParameterConstraints))


def _as_data(value: Any) -> Any:
    """A value as JSON data."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return attrs.asdict(value) if attrs.has(type(value)) else value


def _as_dict(rules: Mapping[str, ParameterConstraints] | None) -> Mapping[str, ParameterConstraints]:
    if rules is not None and not isinstance(rules, Mapping):
        raise InvalidInputError(
            f"constraints must be a dict of table name (or pattern) -> ParameterConstraints, got {rules!r}"
        )
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

    @rules.validator
    def _typed(self, attribute: Any, value: Mapping[str, Any]) -> None:
        for key, rule in value.items():
            if not isinstance(key, str):
                raise InvalidInputError(
                    f"constraints: a key is the name or path of a table, or a pattern; got {key!r}",
                    subject=repr(key),
                )
            if not isinstance(rule, ParameterConstraints):
                raise InvalidInputError(f"constraints[{key!r}] must be a ParameterConstraints, got {rule!r}")

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
