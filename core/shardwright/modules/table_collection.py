"""`TableCollection`: the contract of collections of tables, as sharders take them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import InvalidInputError
from shardwright.modules._lookup import (
    bags_by_feature_of,
    bags_of_feature,
    places_of_examples,
    weights_of_ids,
)
from shardwright.optim.optimizers import copy_in_backward_optimizers
from shardwright.planning.tables.spec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    check_tables,
    embedding_names,
)
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor


class TableCollection(nn.Module, ABC):
    """A collection of tables, as sharders take it: tables in order, their rows, and bags of ids for them.

    Authors of collections derive from it; a sharder for one of pooled tables derives from
    `EmbeddingBagCollectionSharder`, of others from `EmbeddingCollectionSharder`. State dicts name rows
    ``{tables' attribute}.{table}.weight``, the attribute being ``embedding_bags`` or ``embeddings``.

    Args:
        tables: configurations of the tables.
        kind: class that the configurations must have.

    Raises:
        InvalidInputError: there are no tables, one is of another class, has no name or features, or two have one name.

    Attributes:
        output_dtype: dtype of the outputs.
    """

    output_dtype: torch.dtype = torch.float32

    def __init__(self, tables: Sequence[EmbeddingConfig], kind: type[EmbeddingConfig]) -> None:
        super().__init__()
        _check_kind(type(self).__name__, tables, kind)
        check_tables(tables)
        names = embedding_names({table.name: table.feature_names for table in tables})
        self._embedding_names_by_table = [names[table.name] for table in tables]

    def __deepcopy__(self, memo: dict[int, Any]) -> TableCollection:
        """A copy whose weights have their optimizers in the backward pass, too: torch copies parameters without."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        for own, other in zip(self.parameters(), copied.parameters(), strict=True):
            copy_in_backward_optimizers(own, other)
        return copied

    @property
    @abstractmethod
    def tables(self) -> Sequence[EmbeddingConfig]:
        """The tables' configurations, in order."""

    @abstractmethod
    def table_weight(self, table: str) -> Tensor:
        """The rows of the table of that name, as the format of its data type stores them.

        Those of floats are a parameter ``[num_embeddings, embedding_dim]``; one that requires no gradient is frozen.
        """

    @abstractmethod
    def of_tables(self, tables: Sequence[Any], device: torch.device | str | None = None) -> TableCollection:
        """A collection of other tables with the settings of this one."""

    @abstractmethod
    def is_weighted(self) -> bool:
        """True if each id must carry a weight."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.table_weight(self.tables[0].name).device

    def embedding_names(self) -> list[str]:
        """The names of the outputs: tables in order, features in order within a table.

        A feature that is looked up in several tables has several outputs, named ``feature@table``.
        """
        return list(chain.from_iterable(self._embedding_names_by_table))

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the outputs of each table."""
        return [list(names) for names in self._embedding_names_by_table]

    def bags_of(self, features: KeyedJaggedTensor) -> list[tuple[Any, str, JaggedTensor]]:
        """The bags of each feature of each table, in order, with the table's configuration and the feature's name.

        Raises:
            UnknownNameError: a feature is missing.
            InvalidInputError: an id is no row of its table, ids have no weights and need them, or bags and ids do not
                fit each other.
        """
        by_feature = bags_by_feature_of(type(self).__name__, features, self.tables)
        found = [
            (table, name, bags_of_feature(by_feature, name, table))
            for table in self.tables
            for name in table.feature_names
        ]
        if self.is_weighted():
            for table, name, bags in found:
                weights_of_ids(bags, name, table)
        return found

    def pooled_by(
        self, pool: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor], features: KeyedJaggedTensor
    ) -> list[Tensor]:
        """Pool the bags of each feature of each table, in order: ``[B, D]`` each.

        Args:
            pool: function of a table's configuration, ids ``[V]``, offsets ``[B + 1]`` and float32 weights ``[V]`` or
                ``None``, that pools a feature's bags.
            features: the input; see :meth:`bags_of` for what is checked.
        """
        bags_by_output = self.bags_of(features)
        places = places_of_examples(features, self.tables)
        pooled: list[Tensor] = []
        for table, name, bags in bags_by_output:
            weights = weights_of_ids(bags, name, table) if self.is_weighted() else None
            rows = pool(table, bags.values(), bags.offsets(), weights)
            pooled.append(rows if places is None else rows[places[name]])
        return pooled


def _check_kind(owner: str, tables: Any, kind: type[EmbeddingConfig]) -> None:
    # A bag configuration is an EmbeddingConfig too: its pooling would be passed over in silence.
    if not isinstance(tables, Sequence):
        raise InvalidInputError(f"{owner} takes a list of {kind.__name__}s, got {tables!r}")
    if not tables:
        raise InvalidInputError(f"{owner} got no tables; at least one is needed")
    pools = issubclass(kind, EmbeddingBagConfig)
    for index, table in enumerate(tables):
        if not isinstance(table, kind) or isinstance(table, EmbeddingBagConfig) != pools:
            raise InvalidInputError(f"{owner} takes a list of {kind.__name__}s; number {index} is {table!r}")
