"""Collections of unpooled tables that send each id of a batch once, and get its row once.

A batch of sequences has popular ids many times. Here the distinct ids of each feature are sent. The rows that come home
are dealt to all places of their ids, and the gradients of these places are summed before they are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import shardwright as sw

COUNT = "count"
"""Name of the column that says how often a distinct id stands in the batch."""


class DedupEmbeddingCollection(sw.ShardedEmbeddingCollection):
    """The sharded form of an `EmbeddingCollection` that looks up each distinct id of a feature once a batch.

    Outputs, gradients and updates are those of `ShardedEmbeddingCollection`. Only the order in which gradients of an id
    are summed is another.

    A compute kernel that asks for the column `count` gets the number of times that each id stands in the batch, or the
    sum of what the batch's own column of that name says of it.

    Raises:
        UnsupportedError: gradients of single outputs are to be clipped, and only their sums are sent; or a kernel asks
            for another column, of which many values would become one.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        limited = [spec for spec in inputs.specs if spec.max_gradient is not None]
        if limited:
            raise sw.UnsupportedError(
                f"table {limited[0].describe()} clips the gradient of each output (max_gradient), and dedup sends the "
                "sum of an id's gradients: leave one of the two out",
                subject=limited[0].path,
                asked="max_gradient",
            )
        if others := set(self.engine.columns) - {COUNT}:
            raise sw.UnsupportedError(
                f"a compute kernel asks for the column {min(others)!r} of ids, and dedup knows one value of a distinct "
                f"id for {COUNT!r} alone",
                asked=min(others),
            )
        self._batches: WeakKeyDictionary[Any, tuple[sw.KeyedJaggedTensor, dict[str, Tensor]]]
        self._batches = WeakKeyDictionary()

    def begin_input_dist(self, features: sw.KeyedJaggedTensor | None, **further: Any) -> Any:
        """Start the exchange of the distinct ids; see `ShardedEmbeddingCollection`."""
        if not isinstance(features, sw.KeyedJaggedTensor) or not _is_whole(features):
            return super().begin_input_dist(features, **further)  # where all ranks refuse it
        distinct, places = _distinct(features, self.engine.columns.get(COUNT))
        step = super().begin_input_dist(distinct, **further)
        self._batches[step] = features, places
        return step

    def output_dist(self, step: Any) -> sw.LazyAwaitable[dict[str, sw.JaggedTensor]]:
        """The rows of all ids in the batch's order, waited for on first use."""
        rows, batch = super().output_dist(step), self._batches.pop(step, None)
        return rows if batch is None else _Dealt(self, rows, *batch)


class _Dealt(sw.LazyAwaitable[dict[str, sw.JaggedTensor]]):
    """Rows of distinct ids under way, dealt to the places of their ids when they come."""

    def __init__(
        self,
        collection: DedupEmbeddingCollection,
        rows: sw.LazyAwaitable[dict[str, sw.JaggedTensor]],
        features: sw.KeyedJaggedTensor,
        places: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._collection, self._rows, self._features, self._places = collection, rows, features, places

    def _wait_impl(self) -> dict[str, sw.JaggedTensor]:
        known = self._collection.engine.collection
        feature_of = {output.name: known.features[output.feature] for output in known.outputs}
        return {name: self._deal(own, feature_of[name]) for name, own in self._rows.wait().items()}

    def _deal(self, rows: sw.JaggedTensor, feature: str) -> sw.JaggedTensor:
        values, asked = rows.values(), self._features[feature]
        return sw.JaggedTensor(
            values=values.index_select(0, self._places[feature].to(values.device)),
            lengths=asked.lengths().to(values.device),
            weights=asked.values().to(values.device) if self._collection.need_indices else None,
        )


class DedupEmbeddingCollectionSharder(sw.EmbeddingCollectionSharder):
    """Shards an `EmbeddingCollection` so that each distinct id of a feature is sent and looked up once a batch.

    Example:
        >>> import shardwright as sw
        >>> from shardwright_dedup import DedupEmbeddingCollectionSharder
        >>> table = sw.EmbeddingConfig(100, 8, "item", feature_names=["item"])
        >>> sharders = [DedupEmbeddingCollectionSharder({"optimizer": "sgd", "learning_rate": 0.1})]
        >>> env = sw.ShardingEnv.local(device_type="cpu")
        >>> model = sw.DistributedModelParallel(sw.EmbeddingCollection([table]), env=env, sharders=sharders)
        >>> model(sw.KeyedJaggedTensor.from_lists({"item": [[7, 7, 3], [7]]}))["item"].values().shape
        torch.Size([4, 8])
    """

    sharded_type: ClassVar[type[sw.ShardedEmbeddingCollection]] = DedupEmbeddingCollection


def distinct_pooling_factors(batches: Iterable[sw.KeyedJaggedTensor]) -> dict[str, float]:
    """Distinct ids of each feature in a batch, over the examples of the batch, in the mean of some batches.

    A plan of deduplicated tables goes by them as ``pooling_factors``. `shardwright profile` measures all ids instead.

    Args:
        batches: batches of one rank, of the size that it trains on.

    Raises:
        InvalidInputError: there is no batch with examples.
    """
    sums: dict[str, float] = {}
    count = 0
    for batch in batches:
        if batch.stride():
            count += 1
            for key, own in batch.to_dict().items():
                sums[key] = sums.get(key, 0.0) + len(own.values().unique()) / batch.stride()
    if not count:
        raise sw.InvalidInputError("distinct_pooling_factors needs a batch with examples, got none")
    return {key: total / count for key, total in sums.items()}


def _is_whole(features: sw.KeyedJaggedTensor) -> bool:
    """True if there are values, and they are those of the batch's bags, neither more nor fewer."""
    lengths = features.lengths()
    return (
        not lengths.is_meta and bool((lengths >= 0).all()) and int(lengths.sum()) == features.values().numel()
    )


def _distinct(
    features: sw.KeyedJaggedTensor, count_dtype: torch.dtype | None
) -> tuple[sw.KeyedJaggedTensor, dict[str, Tensor]]:
    """The distinct ids of each feature, as one bag, and for each id of the batch its place among them.

    Args:
        features: the batch.
        count_dtype: dtype of the column of counts; ``None`` if no kernel asks for it.
    """
    keys = features.keys()
    found = [features[key].values().unique(return_inverse=True) for key in keys]
    ids = [own for own, _ in found]
    lengths = torch.tensor([len(own) for own in ids], dtype=torch.int32)
    values = torch.cat(ids) if ids else features.values()
    columns = {}
    if count_dtype is not None:
        once = torch.ones_like(features.values(), dtype=count_dtype)
        given = features.columns().get(COUNT, once).split(features.length_per_key())
        sums = [
            count.new_zeros(len(own)).index_add(0, place, count)
            for count, (own, place) in zip(given, found, strict=True)
        ]
        columns[COUNT] = torch.cat(sums) if sums else once
    distinct = sw.KeyedJaggedTensor(
        keys=keys, values=values, lengths=lengths.to(values.device), columns=columns
    )
    return distinct, {key: place for key, (_, place) in zip(keys, found, strict=True)}
