"""Configurations of tables that users write, and the specification that the planner and the engine read.

Nothing here imports torch, so that plans can be made on a machine without it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, unique
from typing import Annotated, Any, Literal

from attrs import evolve, field, frozen

from shardwright.arguments import FiniteFloat, PositiveFloat, Within, brief, check, listed, real, typed, whole
from shardwright.errors import InvalidInputError
from shardwright.planning.documents.limits import MOST_ROWS
from shardwright.planning.layouts.blocks import ColumnRange
from shardwright.planning.layouts.row_maps import RowPart, RowsRange
from shardwright.planning.tables.caching import CacheParams
from shardwright.planning.tables.codecs import QCommsConfig, as_qcomms
from shardwright.planning.tables.data_types import TORCH_NAMES, DataType
from shardwright.planning.tables.optimizers import ASSUMED, STILL, OptimizerSpec


@unique
class PoolingType(Enum):
    """Rule that makes one vector of the embeddings of a bag; ``NONE`` keeps one vector per id (sequence output).

    Example:
        >>> import shardwright as sw
        >>> table = sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"], pooling="mean")
        >>> table.pooling is sw.PoolingType.MEAN
        True
    """

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


RowsOrColumns = Annotated[int, Within(ge=1, le=MOST_ROWS)]


def _pooling(value: PoolingType | str) -> PoolingType:
    if isinstance(value, PoolingType):
        return value
    try:
        return PoolingType(str(value).upper())
    except ValueError:
        known = ", ".join(str(member.value) for member in PoolingType)
        raise InvalidInputError(f"{brief(value)} is no PoolingType. Known: {known}.") from None


def _list(value: Iterable[str]) -> list[str]:
    return list(listed(value))


_Allowed = tuple[tuple[str, tuple[str, ...] | None], ...]


def _allowed(value: Mapping[str, Sequence[str] | None] | _Allowed | None) -> _Allowed | None:
    """A mapping from sharding types to compute kernels as pairs, which can be hashed."""
    if value is None or isinstance(value, tuple):
        return value
    check("allowed", value, Mapping[str, Sequence[str] | None])
    return tuple((name, None if kernels is None else tuple(kernels)) for name, kernels in value.items())


@frozen(hash=False, field_transformer=typed)
class EmbeddingConfig:
    """One table of an ``EmbeddingCollection``.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        name: the table's name, unique in its collection.
        data_type: name of the form in which rows are stored: FP32, FP16 or BF16, of tables that are trained.
        feature_names: the features looked up in this table.
        weight_init_max: upper end of the uniform initial weights; ``sqrt(1 / num_embeddings)`` by default.
        weight_init_min: lower end; ``-sqrt(1 / num_embeddings)`` by default.
        init_fn: initialises a ``[rows, embedding_dim]`` tensor in place, instead of the uniform default.

    Raises:
        InvalidInputError: a size is no positive integer, a feature is no text or named twice, ``init_fn`` cannot
            be called, or the ends of the initial weights are the wrong way round.

    Example:
        >>> import shardwright as sw
        >>> table = sw.EmbeddingConfig(
        ...     num_embeddings=1000, embedding_dim=8, name="item_id", feature_names=["item", "seen"]
        ... )
        >>> table.num_features()
        2
    """

    num_embeddings: RowsOrColumns = field(converter=whole)
    embedding_dim: RowsOrColumns = field(converter=whole)
    name: str = ""
    data_type: DataType = field(default=DataType("FP32"), converter=DataType)
    feature_names: list[str] = field(factory=list, converter=_list)
    weight_init_max: FiniteFloat | None = field(default=None, converter=real)
    weight_init_min: FiniteFloat | None = field(default=None, converter=real)
    init_fn: Callable[[Any], Any] | None = field(default=None, eq=False)

    @feature_names.validator
    def _is_distinct(self, attribute: Any, value: list[str]) -> None:
        repeated = [name for name, count in Counter(value).items() if count > 1]
        if repeated:
            raise InvalidInputError(f"table {self.name!r}: feature_names repeats {repeated[0]!r}: {value}")

    @weight_init_min.validator
    def _is_interval(self, attribute: Any, value: Any) -> None:
        low, high = self.get_weight_init_min(), self.get_weight_init_max()
        if not low <= high:
            raise InvalidInputError(
                f"table {self.name!r}: weight_init_min is {low}, above weight_init_max, which is {high}"
            )

    @property
    def pooling(self) -> PoolingType:
        """``NONE``: one vector per id."""
        return PoolingType.NONE

    def get_weight_init_max(self) -> float:
        """The upper end of the uniform initial weights."""
        return math.sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """The lower end of the uniform initial weights."""
        return -math.sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Count the features that are looked up in this table."""
        return len(self.feature_names)


@frozen(hash=False, field_transformer=typed)
class EmbeddingBagConfig(EmbeddingConfig):
    """One table of an ``EmbeddingBagCollection``: an ``EmbeddingConfig`` with a pooling type.

    Example:
        >>> import shardwright as sw
        >>> table = sw.EmbeddingBagConfig(
        ...     num_embeddings=1000, embedding_dim=8, name="user_id", feature_names=["user"], pooling="MEAN"
        ... )
        >>> table.pooling
        <PoolingType.MEAN: 'MEAN'>
    """

    pooling: PoolingType = field(  # a field where the base derives it
        default=PoolingType.SUM, converter=_pooling
    )

    @pooling.validator
    def _pooled(self, attribute: Any, value: PoolingType) -> None:
        if value is PoolingType.NONE:
            raise InvalidInputError(
                f"table {self.name!r}: pooling is NONE, and an EmbeddingBagCollection pools (SUM or MEAN); "
                "for one vector per id use an EmbeddingCollection"
            )


Update = Literal["in_backward", "in_step"]
"""Times at which an optimizer inside a kernel may update a table, the default first."""


@frozen(field_transformer=typed)
class TableSpec:
    """All that planner and engine know of one table of one module; hashable, without weights and without torch.

    Args:
        name: the table's name, unique in its module.
        num_embeddings: rows.
        embedding_dim: columns.
        feature_names: the features looked up in it, in the module's order.
        data_type: name of the form in which rows are stored: FP32, FP16, BF16, or that of a row format that a compute
            kernel brings.
        pooling: rule that makes one vector of a bag; ``NONE`` for sequences.
        is_weighted: ids carry a weight each.
        module: path of the module in the model ("" for the model itself).
        optimizer: the optimizer that updates it in the backward pass; SGD at 0.01 is assumed where none is given.
            ``None`` if gradients are to be visible.
        qcomms_config: the codecs that its results and gradients travel by; float32 as they are by default.
        cache: the cache on the device, should the table be kept in host memory.
        allowed: the sharding types that its module's sharder allows, each with the compute kernels that it allows with
            it (``None``: those that are offered anyway); ``None``: the sharder leaves the choice to the planner.
        update: time of its optimizer's update: ``"in_backward"``, in each backward pass, or ``"in_step"``, in
            ``optimizer.step()`` by the sum of the gradients since they were cleared.
        max_gradient: largest element, in absolute value, of the gradients of its outputs, averaged over the ranks;
            greater ones are clipped to it. ``None``: none is.
        is_frozen: it is looked up and never updated, so that no gradient travels for it. Its optimizer has no state.

    Example:
        >>> import shardwright as sw
        >>> table = sw.TableSpec("item", 1000, 16, ["item", "seen"], data_type="FP16")
        >>> table.num_embeddings, table.feature_names, str(table.data_type)
        (1000, ('item', 'seen'), 'FP16')
    """

    name: str
    num_embeddings: RowsOrColumns = field(converter=whole)
    embedding_dim: RowsOrColumns = field(converter=whole)
    feature_names: tuple[str, ...] = field(default=(), converter=listed)
    data_type: DataType = field(default=DataType("FP32"), converter=DataType)
    pooling: PoolingType = field(default=PoolingType.SUM, converter=_pooling)
    is_weighted: bool = False
    module: str = ""
    optimizer: OptimizerSpec | None = ASSUMED
    qcomms_config: QCommsConfig | None = field(default=None, converter=as_qcomms)
    cache: CacheParams = field(factory=CacheParams)
    allowed: _Allowed | None = field(default=None, converter=_allowed)
    update: Update = "in_backward"
    max_gradient: PositiveFloat | None = None
    is_frozen: bool = False

    @classmethod
    def from_config(
        cls,
        config: EmbeddingConfig,
        *,
        module: str = "",
        is_weighted: bool = False,
        optimizer: OptimizerSpec | None = None,
        qcomms_config: QCommsConfig | None = None,
        cache: CacheParams | None = None,
        update: Update = "in_backward",
        max_gradient: float | None = None,
        is_frozen: bool = False,
    ) -> TableSpec:
        """The specification of a configured table in the module at path ``module``."""
        return cls(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            feature_names=tuple(config.feature_names),
            data_type=config.data_type,
            pooling=config.pooling,
            is_weighted=is_weighted,
            module=module,
            optimizer=optimizer,
            qcomms_config=qcomms_config,
            cache=cache or CacheParams(),
            update=update,
            max_gradient=max_gradient,
            is_frozen=is_frozen,
        )

    @property
    def path(self) -> str:
        """Module path and name joined by a dot, unique in the model."""
        return f"{self.module}.{self.name}" if self.module else self.name

    @property
    def num_features(self) -> int:
        """Number of features that are looked up in it."""
        return len(self.feature_names)

    def served(self) -> TableSpec:
        """The table as it is served: looked up and never updated.

        One of floats has an optimizer that does nothing, so that any kernel takes it; others have none. A table that is
        frozen already is what it is.
        """
        if self.is_frozen:
            return self
        optimizer = STILL if self.data_type in TORCH_NAMES else None
        return evolve(self, optimizer=optimizer, update="in_backward", max_gradient=None, is_frozen=True)

    def kernels_allowed(self, sharding_type: str) -> tuple[str, ...] | None:
        """Compute kernels that its module's sharder allows with a sharding type; ``None``: whatever is offered."""
        return None if self.allowed is None else dict(self.allowed).get(sharding_type, ())

    @property
    def all_rows(self) -> RowPart:
        """The one part that holds every row."""
        return RowsRange(self.num_embeddings, parts=1)[0]

    @property
    def all_columns(self) -> ColumnRange:
        """The range of every column."""
        return self.columns(0, self.embedding_dim)

    def columns(self, start: int, stop: int) -> ColumnRange:
        """The columns ``start <= c < stop``."""
        return ColumnRange(start, stop)

    def describe(self) -> str:
        """``'user_id' (4_000_000 x 128 FP16)``, for messages."""
        return f"'{self.path}' ({self.num_embeddings:_} x {self.embedding_dim} {self.data_type})"


def embedding_names(features_by_table: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The output names of each table, in TorchRec's form.

    A feature's output bears the feature's name; where the feature is looked up in several tables, it is
    ``feature@table``, so that each name occurs once.

    Args:
        features_by_table: the feature names of each table, in table order.

    Returns:
        The output names of each table, as many as it has features.
    """
    uses = Counter(feature for features in features_by_table.values() for feature in features)
    return {
        table: [f"{feature}@{table}" if uses[feature] > 1 else feature for feature in features]
        for table, features in features_by_table.items()
    }


def check_tables(tables: Iterable[EmbeddingConfig]) -> None:
    """Check that tables can stand in one collection.

    Raises:
        InvalidInputError: a table has no name or no features, or two have one name.
    """
    seen: set[str] = set()
    for index, table in enumerate(tables):
        if not table.name:
            raise InvalidInputError(f"table {index} has no name; each table of a collection needs its own")
        if table.name in seen:
            raise InvalidInputError(f"two tables are named {table.name!r}; each needs its own name")
        if not table.feature_names:
            raise InvalidInputError(
                f"table {table.name!r} has no feature_names: nothing would be looked up in it"
            )
        seen.add(table.name)
