"""`EmbeddingBagCollection` and `EmbeddingCollection`: several embedding tables as one module.

They are plain and exact rather than fast: prototypes for the user, the reference for the sharded modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwright.arguments import checked_only
from shardwright.errors import InvalidInputError
from shardwright.modules._lookup import (
    look_up,
    look_up_and_pool,
)
from shardwright.modules.embedding_configs import dtype_of
from shardwright.modules.table_collection import TableCollection
from shardwright.planning.tables.spec import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class _FloatTables(TableCollection):
    """The common part of collections of float tables: a module of torch for each table, and the draw of its weights."""

    tables_name: ClassVar[str]
    """Attribute that holds the tables, part of the state-dict keys."""

    def _build(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None,
        module_of: Callable[[Any, Tensor], nn.Module],
    ) -> None:
        """Make the modules of tables, and draw their weights.

        Args:
            tables: configurations of the tables.
            device: device of the weights.
            module_of: makes a table's module of its configuration and its weights.
        """
        self._configs, modules = list(tables), nn.ModuleDict()
        for table in tables:
            try:
                dtype = dtype_of(table.data_type)
            except InvalidInputError as error:
                raise InvalidInputError(f"table {table.name!r}: {error}") from None
            size = table.num_embeddings, table.embedding_dim
            try:
                modules[table.name] = module_of(table, torch.empty(size, dtype=dtype, device=device))
            except KeyError as error:  # torch refuses dots, and the names of a module's own methods
                raise InvalidInputError(
                    f"table {table.name!r} cannot be part of a module's state-dict keys: {error.args[0]}. "
                    "Choose another name."
                ) from None
        setattr(self, self.tables_name, modules)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights again: by a table's ``init_fn``, or uniformly. Does nothing on ``meta``."""
        for table in self._configs:
            weight = self.table_weight(table.name)
            if weight.is_meta:
                continue
            if table.init_fn is not None:
                table.init_fn(weight)
            else:
                weight.uniform_(table.get_weight_init_min(), table.get_weight_init_max())

    @property
    def tables(self) -> Sequence[Any]:
        """The tables' configurations, in order."""
        return self._configs

    def table_weight(self, table: str) -> nn.Parameter:
        """The weights of the table of that name: ``[num_embeddings, embedding_dim]``."""
        weight = getattr(self, self.tables_name)[table].weight
        assert isinstance(weight, nn.Parameter)
        return weight


class EmbeddingBagCollection(_FloatTables):
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

    tables_name = "embedding_bags"
    embedding_bags: nn.ModuleDict

    @checked_only("is_weighted", "device")
    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tables, EmbeddingBagConfig)
        self._is_weighted = is_weighted
        self._build(
            tables,
            device,
            lambda table, weight: nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode=table.pooling.value.lower(),
                include_last_offset=True,
                _weight=weight,
            ),
        )

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
        dims = [table.embedding_dim for table in self._configs for _ in table.feature_names]
        weights = [self.table_weight(table.name) for table in self._configs]
        # A product with each table, so that autograd sees them as those of the output.
        zero = torch.stack([weight.to("meta").sum() for weight in weights]).sum() * 0.0
        values = torch.empty(features.stride(), sum(dims), dtype=torch.float32, device="meta") + zero
        return KeyedTensor(keys=self.embedding_names(), length_per_key=dims, values=values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configurations, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """True if each id must carry a weight."""
        return self._is_weighted

    def of_tables(
        self, tables: Sequence[Any], device: torch.device | str | None = None
    ) -> EmbeddingBagCollection:
        """A collection of other tables, weighted as this one."""
        return EmbeddingBagCollection(tables, self._is_weighted, device)


class EmbeddingCollection(_FloatTables):
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

    tables_name = "embeddings"
    embeddings: nn.ModuleDict

    @checked_only("device", "need_indices")
    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__(tables, EmbeddingConfig)
        self._need_indices = need_indices
        self._build(
            tables,
            device,
            lambda table, weight: nn.Embedding(table.num_embeddings, table.embedding_dim, _weight=weight),
        )

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
        return self._configs

    def embedding_dim(self) -> int:
        """The columns of every table.

        Raises:
            InvalidInputError: the tables differ in it.
        """
        dims = {table.name: table.embedding_dim for table in self._configs}
        if len(set(dims.values())) > 1:
            raise InvalidInputError(f"the tables of this collection have different dims: {dims}")
        return self._configs[0].embedding_dim

    def need_indices(self) -> bool:
        """True if outputs carry the ids as their weights."""
        return self._need_indices

    def is_weighted(self) -> bool:
        """False: nothing is pooled."""
        return False

    def of_tables(
        self, tables: Sequence[Any], device: torch.device | str | None = None
    ) -> EmbeddingCollection:
        """A collection of other tables, that returns ids as this one does."""
        return EmbeddingCollection(tables, device, self._need_indices)
