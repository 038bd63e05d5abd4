"""A profile of batches: what planners have to know of the tables' use, as constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, field

from shardwright.errors import InvalidInputError, UnknownNameError, nearest
from shardwright.planning.arrays import Ints
from shardwright.planning.tables.caching import CacheParams
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor
from shardwright_plugins.profiles.cache_statistics import check_rows, distinct_ids, statistics_of

NUM_BINS = 100
"""Sizes of caches that statistics tell apart: a hundredth of the rows is what load factors are chosen by."""


@define(eq=False)
class _Seen:
    """A table, and what the batches had of it.

    Args:
        table: the table.
        ids: ids of each of its features.
        bags: bags of each of its features.
        distinct: distinct ids of each batch, rising.
    """

    table: TableSpec
    ids: Ints
    bags: Ints
    distinct: list[Ints] = field(factory=list)

    @classmethod
    def nothing(cls, table: TableSpec) -> _Seen:
        """Nothing seen yet."""
        return cls(table, np.zeros(table.num_features, np.int64), np.zeros(table.num_features, np.int64))

    def take(self, batch: Mapping[str, JaggedTensor]) -> None:
        """Take in the table's features."""
        features = [_feature(batch, name, self.table) for name in self.table.feature_names]
        distinct = np.unique(np.concatenate([feature.values().numpy() for feature in features]))
        where = f"{', '.join(map(repr, self.table.feature_names))} of table {self.table.describe()}"
        check_rows(f"{where}: batch {len(self.distinct)}", distinct, self.table.num_embeddings)
        # Half of the memory where that is enough: what is kept grows with the sample.
        kind = np.int32 if self.table.num_embeddings <= np.iinfo(np.int32).max else np.int64
        self.distinct.append(distinct.astype(kind))
        self.ids += [len(feature.values()) for feature in features]
        self.bags += [len(feature.lengths()) for feature in features]

    def rule(self, num_samples: int, algorithm: str) -> ParameterConstraints:
        """The constraints that say so."""
        rows = self.table.num_embeddings
        stats = statistics_of(distinct_ids(self.distinct, rows), rows, algorithm, NUM_BINS)
        per_sample = self.bags / num_samples
        return ParameterConstraints(
            pooling_factors=(self.ids / np.maximum(self.bags, 1)).tolist(),
            num_poolings=None if (per_sample == 1).all() else per_sample.tolist(),
            cache_params=CacheParams(algorithm=algorithm, stats=stats),
        )


def _feature(batch: Mapping[str, JaggedTensor], name: str, table: TableSpec) -> JaggedTensor:
    try:
        return batch[name]
    except KeyError:
        raise UnknownNameError(
            f"feature {name!r} of table {table.describe()} is not in the batch, which has {', '.join(batch)}."
            f"{nearest(name, list(batch))}"
        ) from None


class Profile:
    """A profile of the use of tables, collected batch by batch.

    Args:
        tables: tables whose features are in the batches.
        algorithm: rule by which caches evict, ``"lru"`` or ``"lfu"``.

    Attributes:
        num_batches: number of batches that were taken in.

    Raises:
        InvalidInputError: there is no such rule.

    Example:
        >>> import shardwright as sw
        >>> from shardwright_plugins.profiles import Profile
        >>> profile = Profile([sw.TableSpec("user", 100, 8, ["user_id"])])
        >>> for ids in ([[1, 2, 3], [4]], [[1], [2, 3, 4]]):
        ...     profile.add(sw.KeyedJaggedTensor.from_lists({"user_id": ids}))
        >>> rule = profile.constraints()["user"]
        >>> rule.pooling_factors, rule.cache_params.stats.expected_lookups
        ((2.0,), 4.0)
    """

    def __init__(self, tables: Sequence[TableSpec], *, algorithm: str = "lru") -> None:
        self._algorithm = CacheParams(algorithm=algorithm).algorithm
        self._seen = [_Seen.nothing(table) for table in tables]
        self._num_samples = 0
        self.num_batches = 0

    def add(self, batch: KeyedJaggedTensor) -> None:
        """Take in a batch: of all ranks together, for statistics of caches are those of a step.

        Args:
            batch: ids of all features of all tables, and others, on the CPU.

        Raises:
            UnknownNameError: a feature is not in it.
            InvalidInputError: an id is no row of its table.
        """
        features = batch.to_dict()
        for seen in self._seen:
            seen.take(features)
        self._num_samples += batch.stride()
        self.num_batches += 1

    def constraints(self) -> dict[str, ParameterConstraints]:
        """Ids per bag, bags per sample where there are several, and statistics of caches, by the tables' paths.

        Raises:
            InvalidInputError: there were no samples, or fewer than two batches.
        """
        if not self._num_samples:
            raise InvalidInputError("a profile of no samples says nothing: add batches to it")
        return {seen.table.path: seen.rule(self._num_samples, self._algorithm) for seen in self._seen}
