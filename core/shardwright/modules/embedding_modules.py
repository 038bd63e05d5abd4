"""`EmbeddingBagCollection` and `EmbeddingCollection`: several embedding tables as one module.

They are plain and exact rather than fast: prototypes for the user, the reference for the sharded modules.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.fx
from torch import Tensor, nn

from shardwright.arguments import checked_only
from shardwright.errors import InvalidInputError
from shardwright.modules._lookup import (
    evenly_bagged,
    integers,
    look_up,
    look_up_and_pool,
    pooled_outputs,
    sequence_outputs,
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

# Nodes of a trace as they are: they look at what a batch or a table is.
for _name in ("evenly_bagged", "integers", "look_up", "look_up_and_pool"):
    torch.fx.wrap(_name)


class TableCollection(nn.Module, ABC):
    """The common part of collections of tables: configurations, names, device and initial weights.

    Args:
        tables: configurations of the tables.
        kind: class that the configurations must have.
    """

    __jit_unused_properties__: ClassVar[list[str]] = ["tables", "device"]

    def __init__(self, tables: Sequence[EmbeddingConfig], kind: type[EmbeddingConfig]) -> None:
        super().__init__()
        _check_kind(type(self).__name__, tables, kind)
        check_tables(tables)
        names = embedding_names({table.name: table.feature_names for table in tables})
        self._embedding_names_by_table = [names[table.name] for table in tables]
        self._features_by_table = [list(table.feature_names) for table in tables]

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableCollection":
        """A copy whose weights have their optimizers in the backward pass, too: torch copies parameters without."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        for own, other in zip(self.parameters(), copied.parameters(), strict=True):
            copy_in_backward_optimizers(own, other)
        return copied

    @property
    @abstractmethod
    def tables(self) -> Sequence[EmbeddingConfig]:
        """The tables' configurations, in order."""

    @abstractmethod
    def table_weight(self, table: str) -> nn.Parameter:
        """The weights of the table of that name: ``[num_embeddings, embedding_dim]``."""

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

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights anew: by a table's ``init_fn``, or uniformly. Does nothing on ``meta``."""
        for table in self.tables:
            weight = self.table_weight(table.name)
            if weight.is_meta:
                continue
            if table.init_fn is not None:
                table.init_fn(weight)
            else:
                weight.uniform_(table.get_weight_init_min(), table.get_weight_init_max())


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
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self._in_graph(features)
        else:  # TorchScript would compile what stands below the condition
            return self._checked(features)

    def _checked(self, features: Any) -> KeyedTensor:
        if isinstance(features, torch.fx.Proxy):  # a trace: there is no batch yet that could be checked
            return self._in_graph(features)  # type: ignore[arg-type]
        if isinstance(features, KeyedJaggedTensor) and features.values().is_meta:
            return self._on_meta(features)
        pooled = pooled_outputs(
            type(self).__name__, features, self.tables, self._pooled, is_weighted=self._is_weighted
        )
        return KeyedTensor(
            keys=self.embedding_names(),
            length_per_key=[columns.shape[1] for columns in pooled],
            values=torch.cat(pooled, dim=1),
        )

    def _in_graph(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool by statements that TorchScript compiles, and `torch.fx` takes down."""
        bags = evenly_bagged(features)
        names: list[str] = []
        dims: list[int] = []
        pooled: list[Tensor] = []
        for number, table in enumerate(self.embedding_bags.values()):
            for place, feature in enumerate(self._features_by_table[number]):
                own = bags[feature]
                weights: Tensor | None = None
                if self._is_weighted:
                    weights = own.weights().float()
                ids, is_mean = integers(own.values()), table.mode == "mean"
                pooled.append(look_up_and_pool(table.weight, ids, own.offsets(), weights, is_mean))  # type: ignore[arg-type]
                names.append(self._embedding_names_by_table[number][place])
                dims.append(table.embedding_dim)  # type: ignore[arg-type]
        return KeyedTensor(names, dims, torch.cat(pooled, dim=1))

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

    @property
    def tables(self) -> Sequence[EmbeddingBagConfig]:
        """The tables' configurations, in order."""
        return self._embedding_bag_configs

    def table_weight(self, table: str) -> nn.Parameter:
        """The weights of the table of that name: ``[num_embeddings, embedding_dim]``."""
        return _weight(self.embedding_bags, table)


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
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self._in_graph(features)
        else:  # TorchScript would compile what stands below the condition
            return self._checked(features)

    def _checked(self, features: Any) -> dict[str, JaggedTensor]:
        if isinstance(features, torch.fx.Proxy):  # a trace: there is no batch yet that could be checked
            return self._in_graph(features)  # type: ignore[arg-type]
        found = sequence_outputs(type(self).__name__, features, self.tables, self._rows)
        return {
            name: JaggedTensor(
                values=rows, lengths=bags.lengths(), weights=bags.values() if self._need_indices else None
            )
            for name, (bags, rows) in zip(self.embedding_names(), found, strict=True)
        }

    def _in_graph(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up by statements that TorchScript compiles, and `torch.fx` takes down."""
        bags = features.to_dict()
        found: dict[str, JaggedTensor] = {}
        for number, table in enumerate(self.embeddings.values()):
            for place, feature in enumerate(self._features_by_table[number]):
                own = bags[feature]
                ids = own.values()
                indices: Tensor | None = None
                if self._need_indices:
                    indices = ids
                rows = look_up(table.weight, integers(ids))  # type: ignore[arg-type]
                name = self._embedding_names_by_table[number][place]
                found[name] = JaggedTensor(rows, indices, own.lengths())
        return found

    def _rows(self, table: EmbeddingConfig, ids: Tensor) -> Tensor:
        return look_up(self.table_weight(table.name), ids)

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

    @property
    def tables(self) -> Sequence[EmbeddingConfig]:
        """The tables' configurations, in order."""
        return self._embedding_configs

    def table_weight(self, table: str) -> nn.Parameter:
        """The weights of the table of that name: ``[num_embeddings, embedding_dim]``."""
        return _weight(self.embeddings, table)


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
