"""Constraints as TorchRec reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

import shardwright as sw
from shardwright.host import host
from shardwright_torchrec.modules.replaceable import replaceable
from shardwright_torchrec.parallel.kernel_names import all_fused
from shardwright_torchrec.parallel.sharders import REPLICATED, kernels_with_gradients


class CacheParams(sw.CacheParams):
    """Parameters of the cache of a table in host memory, with TorchRec's arguments in TorchRec's order.

    Args:
        algorithm: `"lru"`, `"lfu"`, or FBGEMM's `CacheAlgorithm`; LRU by default.
        load_factor: part of the table's rows that the cache holds.
        reserved_memory: must be None or 0; `load_factor` says how large the cache is.
        precision: data type of rows in the cache. It must be the table's; the planner checks it.
        prefetch_pipeline: not used; pipelines fetch rows ahead where a kernel has any to fetch.
        stats: behaviour of the table's ids.
        multipass_prefetch_config: must be None.

    Raises:
        UnsupportedError: something is not supported; the text names it, and what to do.
    """

    def __init__(
        self,
        algorithm: Any = None,
        load_factor: float | None = None,
        reserved_memory: float | None = None,
        precision: Any = None,
        prefetch_pipeline: bool | None = None,
        stats: Any = None,
        multipass_prefetch_config: Any = None,
    ) -> None:
        _refuse(
            "CacheParams",
            reserved_memory=reserved_memory or None,
            multipass_prefetch_config=multipass_prefetch_config,
        )
        super().__init__(load_factor, "lru" if algorithm is None else algorithm, stats)
        object.__setattr__(self, "precision", precision)


@replaceable
class ParameterConstraints(sw.ParameterConstraints):
    """Demands on a table, with TorchRec's arguments in TorchRec's order.

    Args:
        sharding_types: sharding types allowed.
        compute_kernels: compute kernels allowed.
        min_partition: fewest columns of a block.
        pooling_factors: ids per bag of each feature.
        num_poolings: bags per sample of each feature.
        batch_sizes: samples per rank and step of each feature.
        is_weighted: ids carry weights; as the module says if false.
        cache_params: cache of a table that is kept in host memory.
        enforce_hbm: must be false; states lie where the compute kernel keeps them.
        stochastic_rounding: must be false; `fused_params` of a sharder say it for its tables.
        bounds_check_mode: must be None; `fused_params` of a sharder say it for its batches.
        feature_names: kept, and not used; the table's configuration names them.
        output_dtype: must be None or float32.
        device_group: type of the device that must hold the table.
        key_value_params: not supported.
        use_virtual_table: must be false.
        further: further fields of `shardwright.ParameterConstraints`.

    Raises:
        UnsupportedError: something is not supported; the text names it, and the argument to give instead.
    """

    enforce_hbm: None = None
    stochastic_rounding: None = None
    bounds_check_mode: None = None
    key_value_params: None = None
    output_dtype: None = None
    use_virtual_table: bool = False

    def __init__(
        self,
        sharding_types: list[str] | None = None,
        compute_kernels: list[str] | None = None,
        min_partition: int | None = None,
        pooling_factors: list[float] | None = None,
        num_poolings: list[float] | None = None,
        batch_sizes: list[int] | None = None,
        is_weighted: bool | None = False,
        cache_params: sw.CacheParams | None = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: Any = None,
        feature_names: list[str] | None = None,
        output_dtype: Any = None,
        device_group: str | None = None,
        key_value_params: Any = None,
        use_virtual_table: bool = False,
        **further: Any,
    ) -> None:
        _refuse(
            "ParameterConstraints",
            enforce_hbm=enforce_hbm,
            stochastic_rounding=stochastic_rounding,
            bounds_check_mode=bounds_check_mode,
            key_value_params=key_value_params,
            use_virtual_table=use_virtual_table,
            output_dtype=None if output_dtype is sw.DataType.FP32 else output_dtype,
        )
        object.__setattr__(self, "feature_names", None if feature_names is None else list(feature_names))
        super().__init__(
            sharding_types=sharding_types,
            compute_kernels=compute_kernels,
            min_partition=min_partition,
            pooling_factors=pooling_factors or None,
            num_poolings=num_poolings,
            batch_sizes=batch_sizes,
            is_weighted=is_weighted or None,
            cache_params=cache_params,
            device_group=device_group,
            **further,
        )

    def __setattr__(self, field: str, value: Any) -> None:
        """Set an argument, checked as at first.

        Raises:
            UnsupportedError: it is not supported.
        """
        if not hasattr(self, field):
            raise AttributeError(f"ParameterConstraints have no {field!r}")
        object.__setattr__(self, field, getattr(ParameterConstraints(**{field: value}), field))
        object.__setattr__(self, "_attrs_cached_hash", None)  # of what it was


_INSTEAD = {
    "reserved_memory": "load_factor says how many rows the cache holds",
    "multipass_prefetch_config": "rows are fetched ahead in one pass",
    "enforce_hbm": "optimizer states lie where the compute kernel keeps them; name another in compute_kernels",
    "stochastic_rounding": "it is the optimizer's: give the sharder fused_params={'stochastic_rounding': True}",
    "bounds_check_mode": "batches are checked for all tables of a collection: give the sharder "
    "fused_params={'bounds_check_mode': ...}",
    "key_value_params": "there is no store of rows on a disk; tables of any id are in shardwright-hash-embedding",
    "output_dtype": "lookups give float32; a codec (qcomms_config) sends results in fewer bytes",
    "use_virtual_table": "tables of any id are in shardwright-hash-embedding",
}


def _refuse(owner: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise sw.UnsupportedError(f"{owner}({name}={value!r}): {_INSTEAD[name]}")


def check_precisions(
    constraints: Mapping[str, sw.ParameterConstraints] | None, tables: Iterable[sw.TableSpec]
) -> None:
    """Check that rows of caches are asked for in their tables' data types.

    Raises:
        UnsupportedError: a cache is to have another.
    """
    for table in tables:
        rule = (constraints or {}).get(table.name)
        asked = getattr(rule and rule.cache_params, "precision", None)
        if asked is not None and getattr(asked, "name", asked) != table.data_type.name:
            raise sw.UnsupportedError(
                f"CacheParams(precision={asked!r}) of table {table.name!r}: rows in a cache have the table's data "
                f"type, {table.data_type.name}. Leave precision out, or give the table another data_type"
            )


def as_torchrec_reads(
    constraints: Mapping[str, sw.ParameterConstraints] | None,
) -> dict[str, sw.ParameterConstraints] | None:
    """The constraints as TorchRec reads them.

    A table that may be nothing but replicated takes the kernel that its sharder has for that, whatever fused kernels
    the constraints name: TorchRec's tutorial on sharding does so. Else `fused` are all kernels that TorchRec calls so.
    """
    if constraints is None:
        return None
    return {name: _with_all_fused(_without_fused(rule)) for name, rule in constraints.items()}


def _with_all_fused(rule: sw.ParameterConstraints) -> sw.ParameterConstraints:
    if rule.compute_kernels is None:
        return rule
    return attrs.evolve(rule, compute_kernels=all_fused(rule.compute_kernels))


def _without_fused(rule: sw.ParameterConstraints) -> sw.ParameterConstraints:
    if rule.sharding_types != (REPLICATED,) or rule.compute_kernels is None:
        return rule
    kernels = host().compute_kernels
    if {kernels.canonical(name) for name in rule.compute_kernels} & set(kernels_with_gradients()):
        return rule
    return attrs.evolve(rule, compute_kernels=None)
