"""`EmbeddingBagCollection` and `EmbeddingCollection`: several embedding tables as one module.

They are plain and exact rather than fast: prototypes for the user, the reference for the sharded modules.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.arguments import checked_only
from shardwright.errors import InvalidInputError
from shardwright.modules._lookup import (
    bags_by_feature_of,
    bags_of_feature,
    look_up,
    look_up_and_pool,
    places_of_examples,
    weights_of_ids,
)
from shardwright.modules.embedding_configs import dtype_of
from shardwright.optim.optimizers import copy_in_backward_optimizers
from shardwright.planning.tables.spec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
    embedding_names,
)
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "TableCollection"]


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


class EmbeddingBagCollection(TableCollection):
    """Embedding tables whose bags of ids are pooled, into one vector a bag.

    Legend: B batch size, F features (counted once a table), D columns in all.

    Args:
        tables: the tables, each with its pooling (``SUM`` or ``MEAN``) and its features.
        is_weighted: each id carries a weight, with which its row is multiplied.
        device: device of the weights; on ``"meta"`` they take no memory.

    Raises:
        InvalidInputError: there are no tables, one has no name or features, or two have one name.

    Example:
        >>> import torch, shardwright as sw
        >>> table = sw.EmbeddingBagConfig(
        ...     num_embeddings=10, embedding_dim=2, name="products", feature_names=["bought"],
        ...     init_fn=torch.nn.init.ones_,
        ... )
        >>> collection = sw.EmbeddingBagCollection(tables=[table], device="cpu")
        >>> features = sw.KeyedJaggedTensor.from_lists({"bought": [[3, 1], [], [4]]})
        >>> collection(features)["bought"]  # one vector a bag: ones are added up
        tensor([[2., 2.],
                [0., 0.],
                [1., 1.]], grad_fn=<...>)
    """

    @checked_only("is_weighted", "device")
    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tables, EmbeddingBagConfig)
        self._is_weighted = is_weighted
        self._embedding_bag_configs = list(tables)
        self.embedding_bags = nn.ModuleDict()
        for table in tables:
            bag = nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode=table.pooling.value.lower(),
                include_last_offset=True,
                _weight=_empty_weight(table, device),
            )
            _add(self.embedding_bags, table.name, bag)
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the embeddings of each bag.

        Args:
            features: the bags of at least the features of the tables.

        Returns:
            ``[B, D]`` float32 under F names (see `embedding_names`); an empty bag gives zeros. Features with batch
            sizes of their own give the rows of whole examples, by the input's inverse indices.

        Raises:
            UnknownNameError: a feature is missing.
            IdRangeError: an id is out of range.
            InvalidInputError: the collection is weighted and the input is not, or features have
                different batch sizes and the input no inverse indices.
        """
        if isinstance(features, KeyedJaggedTensor) and features.values().is_meta:
            return self._on_meta(features)
        pooled = self.pooled_by(self._pooled, features)
        return KeyedTensor(
            keys=self.embedding_names(),
            length_per_key=[columns.shape[1] for columns in pooled],
            values=torch.cat(pooled, dim=1),
        )

    def _pooled(
        self, table: EmbeddingBagConfig, ids: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> Tensor:
        is_mean = table.pooling is PoolingType.MEAN
        return look_up_and_pool(self.table_weight(table.name), ids, offsets, weights, is_mean)

    def _on_meta(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The shape of the output for a batch on ``meta``, which says how many examples there are, not how many ids."""
        dims = [table.embedding_dim for table in self._embedding_bag_configs for _ in table.feature_names]
        weights = [self.table_weight(table.name) for table in self._embedding_bag_configs]
        # A product with each table, so that autograd sees them as those of the output.
        zero = torch.stack([weight.to("meta").sum() for weight in weights]).sum() * 0.0
        values = torch.empty(features.stride(), sum(dims), dtype=torch.float32, device="meta") + zero
        return KeyedTensor(keys=self.embedding_names(), length_per_key=dims, values=values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configurations, in order."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """True if each id must carry a weight."""
        return self._is_weighted

    def reset_parameters(self) -> None:
        """Draw the initial weights again: by a table's ``init_fn``, or uniformly. Does nothing on ``meta``."""
        _draw(self)

    @property
    def tables(self) -> Sequence[EmbeddingBagConfig]:
        """The tables' configurations, in order."""
        return self._embedding_bag_configs

    def table_weight(self, table: str) -> nn.Parameter:
        """The weights of the table of that name: ``[num_embeddings, embedding_dim]``."""
        return _weight(self.embedding_bags, table)

    def of_tables(
        self, tables: Sequence[Any], device: torch.device | str | None = None
    ) -> EmbeddingBagCollection:
        """A collection of other tables, weighted as this one."""
        return EmbeddingBagCollection(tables, self._is_weighted, device)


class EmbeddingCollection(TableCollection):
    """Embedding tables whose ids are looked up one by one: as many vectors as ids.

    Args:
        tables: the tables; they may have different ``embedding_dim``, unlike TorchRec's.
        device: device of the weights; on ``"meta"`` they take no memory.
        need_indices: return the ids as well, as the weights of the outputs.

    Raises:
        InvalidInputError: there are no tables, one has no name or features, or two have one name.

    Example:
        >>> import torch, shardwright as sw
        >>> table = sw.EmbeddingConfig(
        ...     num_embeddings=10, embedding_dim=2, name="movies", feature_names=["seen"],
        ...     init_fn=torch.nn.init.ones_,
        ... )
        >>> collection = sw.EmbeddingCollection(tables=[table], device="cpu")
        >>> features = sw.KeyedJaggedTensor.from_lists({"seen": [[3, 1], [], [4]]})
        >>> collection(features)["seen"].values()  # one vector an id
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]], grad_fn=<...>)
    """

    @checked_only("device", "need_indices")
    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__(tables, EmbeddingConfig)
        self._need_indices = need_indices
        self._embedding_configs = list(tables)
        self.embeddings = nn.ModuleDict()
        for table in tables:
            embedding = nn.Embedding(
                table.num_embeddings, table.embedding_dim, _weight=_empty_weight(table, device)
            )
            _add(self.embeddings, table.name, embedding)
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up each id.

        Args:
            features: the bags of at least the features of the tables.

        Returns:
            For each output name (see `embedding_names`) the rows, ``[ids, embedding_dim]`` float32, with the
            lengths of the input.

        Raises:
            UnknownNameError: a feature is missing.
            IdRangeError: an id is out of range.
        """
        return {
            name: JaggedTensor(
                values=look_up(self.table_weight(table.name), bags.values()),
                lengths=bags.lengths(),
                weights=bags.values() if self._need_indices else None,
            )
            for name, (table, _, bags) in zip(self.embedding_names(), self.bags_of(features), strict=True)
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configurations, in order."""
        return self._embedding_configs

    def embedding_dim(self) -> int:
        """The columns of every table.

        Raises:
            InvalidInputError: the tables differ in it.
        """
        dims = {table.name: table.embedding_dim for table in self._embedding_configs}
        if len(set(dims.values())) > 1:
            raise InvalidInputError(f"the tables of this collection have different dims: {dims}")
        return self._embedding_configs[0].embedding_dim

    def need_indices(self) -> bool:
        """True if outputs carry the ids as their weights."""
        return self._need_indices

    def is_weighted(self) -> bool:
        """False: nothing is pooled."""
        return False

    def reset_parameters(self) -> None:
        """Draw the initial weights again: by a table's ``init_fn``, or uniformly. Does nothing on ``meta``."""
        _draw(self)

    @property
    def tables(self) -> Sequence[EmbeddingConfig]:
        """The tables' configurations, in order."""
        return self._embedding_configs

    def table_weight(self, table: str) -> nn.Parameter:
        """The weights of the table of that name: ``[num_embeddings, embedding_dim]``."""
        return _weight(self.embeddings, table)

    def of_tables(
        self, tables: Sequence[Any], device: torch.device | str | None = None
    ) -> EmbeddingCollection:
        """A collection of other tables, that returns ids as this one does."""
        return EmbeddingCollection(tables, device, self._need_indices)


@torch.no_grad()
def _draw(collection: TableCollection) -> None:
    """Draw the initial weights of all tables."""
    for table in collection.tables:
        weight = collection.table_weight(table.name)
        if weight.is_meta:
            continue
        if table.init_fn is not None:
            table.init_fn(weight)
        else:
            weight.uniform_(table.get_weight_init_min(), table.get_weight_init_max())


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


def _empty_weight(table: EmbeddingConfig, device: torch.device | str | None) -> Tensor:
    try:
        dtype = dtype_of(table.data_type)
    except InvalidInputError as error:
        raise InvalidInputError(f"table {table.name!r}: {error}") from None
    return torch.empty(table.num_embeddings, table.embedding_dim, dtype=dtype, device=device)


def _add(modules: nn.ModuleDict, name: str, module: nn.Module) -> None:
    """Add a table's module, whose name becomes part of the state-dict keys."""
    try:
        modules[name] = module
    except KeyError as error:  # torch refuses dots, and the names of a module's own methods
        raise InvalidInputError(
            f"table {name!r} cannot be part of a module's state-dict keys: {error.args[0]}. "
            "Choose another name."
        ) from None


def _weight(modules: nn.ModuleDict, table: str) -> nn.Parameter:
    weight = modules[table].weight
    assert isinstance(weight, nn.Parameter)
    return weight
