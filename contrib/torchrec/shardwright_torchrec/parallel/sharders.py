"""The sharders of TorchRec's scripts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

from attrs import evolve
from shardwright_dedup import DedupEmbeddingCollection
from torch import nn

import shardwright as sw
from shardwright.host import host
from shardwright_torchrec.distributed.fused_params import checks_of, own_params
from shardwright_torchrec.parallel.kernel_names import all_fused, own_shardings

REPLICATED = "data_parallel"
_OF_SCRIPT = sw.OptimizerSpec(is_assumed=True)
"""Optimizer of a table that the script's own updates."""


class _AsInTorchRec(sw.ModuleSharder):
    """A sharder that takes FBGEMM's settings, and leaves replicated tables without an optimizer to the script's.

    Weights are rank 0's.

    Args:
        fused_params: settings, under FBGEMM's names too.
        qcomm_codecs_registry: see `shardwright.ModuleSharder`.
        further: further arguments of `shardwright.ModuleSharder`.
    """

    sync_module_states = True  # TorchRec cuts each rank's shards out of that rank's module

    def __init__(
        self, fused_params: Mapping[str, Any] | None = None, qcomm_codecs_registry: Any = None, **further: Any
    ) -> None:
        self._left: frozenset[str] = frozenset()
        checks = checks_of(fused_params)
        super().__init__(
            own_params(fused_params), qcomm_codecs_registry, **{"input_checks": checks, **further}
        )

    def allowed(
        self, table: sw.TableSpec, compute_device_type: str
    ) -> Mapping[str, Sequence[str] | None] | None:
        """Sharding types for a table; the replicated one with kernels that show gradients, if nobody gave an optimizer.

        Not where a subclass overrides `compute_kernels`.
        """
        found = super().allowed(table, compute_device_type)
        if found is not None:
            found = {kind: None if own is None else all_fused(own) for kind, own in found.items()}
        if table.optimizer is None or not table.optimizer.is_assumed:
            return found
        found = dict.fromkeys(host().sharding_types) if found is None else dict(found)
        if REPLICATED in found and found[REPLICATED] is None:
            found[REPLICATED] = kernels_with_gradients()
        return found

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Weights of the module's tables by table; all of them are sharded."""
        found = dict(module.named_parameters())
        names = {table.name: f".{table.name}.weight" for table in self.tables(module)}
        return {
            name: parameter
            for name, end in names.items()
            for path, parameter in found.items()
            if f".{path}".endswith(end)
        }

    def tables(self, module: nn.Module, path: str = "") -> list[sw.TableSpec]:
        """See `shardwright.ModuleSharder.tables`."""
        found = super().tables(module, path)
        return [evolve(table, optimizer=_OF_SCRIPT) if table.name in self._left else table for table in found]

    def shard(self, module: Any, params: Any, *others: Any, **further: Any) -> Any:
        """See `shardwright.ModuleSharder.shard`; a plan may say TorchRec's names of compute kernels.

        Where it says a kernel that shows gradients, the script's optimizer updates the table, whichever was given for
        the backward pass. A warning tells so.
        """
        tables = self.tables(module)
        own = own_shardings(params, tables)
        sharder = copy(self)
        sharder._left = frozenset(_left_by(own, tables))
        return super(_AsInTorchRec, sharder).shard(module, own, *others, **further)


class EmbeddingBagCollectionSharder(_AsInTorchRec, sw.EmbeddingBagCollectionSharder):
    """Shards `EmbeddingBagCollection`s."""


class EmbeddingCollectionSharder(_AsInTorchRec, sw.EmbeddingCollectionSharder):
    """Shards `EmbeddingCollection`s.

    Args:
        fused_params: see `shardwright.ModuleSharder`.
        qcomm_codecs_registry: see there.
        use_index_dedup: send an id that occurs several times in a batch once, by `shardwright_dedup`.
        further: further arguments of `shardwright.ModuleSharder`.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
        use_index_dedup: bool = False,
        **further: Any,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry, **further)
        if use_index_dedup:
            self.sharded_type = DedupEmbeddingCollection  # type: ignore[misc]


def get_default_sharders() -> list[sw.ModuleSharder]:
    """One sharder for each class of collections."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def _left_by(params: Mapping[str, sw.ParameterSharding], tables: Iterable[sw.TableSpec]) -> list[str]:
    """Tables with an optimizer for the backward pass whose planned kernels run none."""
    showing = kernels_with_gradients()
    given = {table.name: table.optimizer for table in tables if table.name in params}
    left = [
        name
        for name, optimizer in given.items()
        if optimizer is not None and not optimizer.is_assumed and params[name].compute_kernel in showing
    ]
    for name in left:
        warnings.warn(
            f"table {name!r}: the plan gives it the kernel {params[name].compute_kernel!r}, which shows gradients: "
            f"{given[name]} does not run in the backward pass. Step an optimizer of the table's parameter",
            RuntimeWarning,
            stacklevel=3,
        )
    return left


def kernels_with_gradients() -> list[str]:
    """Names of the compute kernels that leave the update to the script's optimizer."""
    kernels = host().compute_kernels
    return [name for name in kernels if not kernels[name].fuses_optimizer]
