"""Configurations of tables with TorchRec's fields, in TorchRec's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

import shardwright as sw
from shardwright_torchrec.modules.replaceable import replaceable

BaseEmbeddingConfig = sw.EmbeddingConfig

_INSTEAD = {
    "num_embeddings_post_pruning": "tables have all of their rows; prune before, and give num_embeddings",
    "need_pos": "position weights are FeatureProcessedEmbeddingBagCollection's",
    "input_dim": "ids are below num_embeddings; shardwright-hash-embedding has tables of any id",
    "total_num_buckets": "rows are cut by the sharding type",
    "use_virtual_table": "shardwright-hash-embedding has tables of any id",
    "virtual_table_eviction_policy": "shardwright-hash-embedding has tables of any id",
    "enable_embedding_update": "apply_optimizer_in_backward, or load_state_dict, updates tables",
    "stash_weights": "kernels that keep rows in host memory are chosen by compute_kernels",
}


def _refuse(name: str, given: dict[str, Any]) -> None:
    for field, instead in _INSTEAD.items():
        if given[field] is not None and given[field] is not False:
            raise sw.UnsupportedError(f"table {name!r}: {field}={given[field]!r} is not supported: {instead}")


class _AsInTorchRec:
    """Fields that stay at TorchRec's defaults, and fields that scripts set after they have made a configuration."""

    num_embeddings_post_pruning: None = None
    need_pos: bool = False
    input_dim: None = None
    total_num_buckets: None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: None = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __setattr__(self, field: str, value: Any) -> None:
        """Set a field, checked as at first; tables that were made of the configuration stay as they are.

        Raises:
            UnsupportedError: it is not supported.
            InvalidInputError: the value is none of the field's.
        """
        if field in _INSTEAD:
            _refuse(getattr(self, "name", ""), {**dict.fromkeys(_INSTEAD), field: value})
        config: Any = self
        changed = config if field in _INSTEAD else attrs.evolve(config, **{field: value})
        object.__setattr__(self, field, getattr(changed, field))


@replaceable
class EmbeddingConfig(_AsInTorchRec, sw.EmbeddingConfig):
    """One table of an `EmbeddingCollection`; see `shardwright.EmbeddingConfig`.

    Raises:
        UnsupportedError: a field of TorchRec's that is not supported is given; the text has what to do.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str = "",
        data_type: sw.DataType = sw.DataType.FP32,
        feature_names: list[str] = (),  # type: ignore[assignment]  # a list is made of it
        weight_init_max: float | None = None,
        weight_init_min: float | None = None,
        num_embeddings_post_pruning: int | None = None,
        init_fn: Callable[[Any], Any] | None = None,
        need_pos: bool = False,
        input_dim: int | None = None,
        total_num_buckets: int | None = None,
        use_virtual_table: bool = False,
        virtual_table_eviction_policy: Any = None,
        enable_embedding_update: bool = False,
        stash_weights: bool = False,
    ) -> None:
        _refuse(name, {field: value for field, value in locals().items() if field in _INSTEAD})
        super().__init__(
            num_embeddings,
            embedding_dim,
            name,
            data_type,
            list(feature_names),
            weight_init_max,
            weight_init_min,
            init_fn,
        )


@replaceable
class EmbeddingBagConfig(_AsInTorchRec, sw.EmbeddingBagConfig):
    """One table of an `EmbeddingBagCollection`; see `shardwright.EmbeddingBagConfig`.

    Raises:
        UnsupportedError: a field of TorchRec's that is not supported is given; the text has what to do.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str = "",
        data_type: sw.DataType = sw.DataType.FP32,
        feature_names: list[str] = (),  # type: ignore[assignment]  # a list is made of it
        weight_init_max: float | None = None,
        weight_init_min: float | None = None,
        num_embeddings_post_pruning: int | None = None,
        init_fn: Callable[[Any], Any] | None = None,
        need_pos: bool = False,
        input_dim: int | None = None,
        total_num_buckets: int | None = None,
        use_virtual_table: bool = False,
        virtual_table_eviction_policy: Any = None,
        enable_embedding_update: bool = False,
        stash_weights: bool = False,
        pooling: sw.PoolingType = sw.PoolingType.SUM,
    ) -> None:
        _refuse(name, {field: value for field, value in locals().items() if field in _INSTEAD})
        super().__init__(
            num_embeddings,
            embedding_dim,
            name,
            data_type,
            list(feature_names),
            weight_init_max,
            weight_init_min,
            init_fn,
            pooling,
        )
