"""A collection of tables as the engine sees it: features, and outputs in order.

Legend: F features, B batch size, N ids, D columns of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from itertools import accumulate

from attrs import field, frozen
from torch import Tensor

from shardwright.planning.arrays import Ints
from shardwright.planning.tables.spec import PoolingType, TableSpec, embedding_names


@frozen
class Output:
    """One feature of one table: in a pooled collection, the output's columns ``start <= c < stop``."""

    name: str
    table: int
    feature: int
    start: int
    stop: int

    @property
    def dim(self) -> int:
        """``D``."""
        return self.stop - self.start


@frozen(eq=False)
class Collection:
    """Tables, features and outputs of one module."""

    tables: tuple[TableSpec, ...]
    features: tuple[str, ...]
    outputs: tuple[Output, ...]

    @classmethod
    def of(cls, tables: Sequence[TableSpec]) -> Collection:
        """The collection of ``tables``, in the module's order."""
        features = tuple(dict.fromkeys(name for table in tables for name in table.feature_names))
        position = {name: index for index, name in enumerate(features)}
        names = embedding_names({table.name: table.feature_names for table in tables})
        pairs = [
            (names[table.name][i], index, position[feature], table.embedding_dim)
            for index, table in enumerate(tables)
            for i, feature in enumerate(table.feature_names)
        ]
        stops = list(accumulate(dim for *_, dim in pairs))
        outputs = tuple(
            Output(name, table, feature, stop - dim, stop)
            for (name, table, feature, dim), stop in zip(pairs, stops, strict=True)
        )
        return cls(tuple(tables), features, outputs)

    @property
    def name(self) -> str:
        """Name in error messages: the collection's path in the model, or its tables if it is the whole model."""
        names = ", ".join(repr(table.name) for table in self.tables[:3])
        more = ", ..." if len(self.tables) > 3 else ""
        return repr(self.tables[0].module) if self.tables[0].module else f"the tables {names}{more}"

    @property
    def is_pooled(self) -> bool:
        """True if outputs have one vector per bag, false if one per id; a collection has tables of one kind."""
        return self.tables[0].pooling is not PoolingType.NONE

    @property
    def width(self) -> int:
        """Columns of the pooled output."""
        return self.outputs[-1].stop

    @cached_property
    def outputs_by_table(self) -> list[list[int]]:
        """Indices of each table's outputs."""
        outputs: list[list[int]] = [[] for _ in self.tables]
        for index, output in enumerate(self.outputs):
            outputs[output.table].append(index)
        return outputs

    def smallest_table(self, feature: int, *, but: AbstractSet[int] = frozenset()) -> TableSpec | None:
        """Find the table with the fewest rows among those that a feature is looked up in.

        Args:
            feature: index of the feature.
            but: indices of tables to leave out.
        """
        places = [output.table for output in self.outputs if output.feature == feature]
        tables = [self.tables[place] for place in places if place not in but]
        return min(tables, key=lambda table: table.num_embeddings, default=None)


@frozen(eq=False)
class FeatureBatch:
    """A checked batch, its features in the collection's order.

    Args:
        lengths: ``[F, B]`` int32; where features have batch sizes of their own, filled up with zeros to the greatest.
        values: ``[N]`` int64 ids, feature after feature.
        columns: columns of the ids by name, ``[N]`` each: weights, float32, in weighted collections, and those that
            compute kernels ask for.
        num_ids: ids of each feature, ``[F]``, in host memory.
        sizes: batch size of each feature, ``[F]``, in host memory; ``None`` if each has ``B``.
        inverse: place of each example of the whole batch among those of each feature, ``[F, examples]`` int64; ``None``
            if outputs are of ``B`` examples.
        trained_weights: the weights as autograd knows them, where they are trained; else ``None``.
    """

    lengths: Tensor
    values: Tensor
    columns: Mapping[str, Tensor]
    num_ids: Ints
    sizes: Ints | None = None
    inverse: Tensor | None = None
    trained_weights: Tensor | None = None
    batch_size: int = field(init=False)
    """``B``."""

    @batch_size.default
    def _batch_size(self) -> int:
        return self.lengths.shape[1]

    def lengths_of(self, feature: int) -> Tensor:
        """Number of ids of each of a feature's own bags."""
        lengths = self.lengths[feature]
        return lengths if self.sizes is None else lengths[: self.sizes[feature]]

    @cached_property
    def ids(self) -> tuple[Tensor, ...]:
        """Ids of each feature, as views of ``values``."""
        return self.values.split_with_sizes(self.num_ids.tolist())

    @cached_property
    def of_means(self) -> Tensor:
        """The factor of each bag's sum in its mean, ``1 / max(ids of the bag, 1)``: ``[F, B]`` float32.

        They are kept for the backward pass: by then the caller may have filled the memory of the lengths again.
        """
        return self.lengths.clamp(min=1).float().reciprocal_()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the batch."""
        inverse = () if self.inverse is None else (self.inverse,)
        return [self.lengths, self.values, *self.columns.values(), *inverse]
