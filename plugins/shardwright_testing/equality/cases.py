"""Cases of training: tables, how they are sharded, and each rank's batches, the same each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn

from shardwright.contracts import ShardingType
from shardwright.errors import UnsupportedError
from shardwright.host.plugin_host import host
from shardwright.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from shardwright.planning.layouts.layout import Block, Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.optimizers import ASSUMED
from shardwright.planning.tables.spec import EmbeddingBagConfig, EmbeddingConfig, TableSpec
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.collections.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharder,
)
from shardwright.sparse import KeyedJaggedTensor
from shardwright_testing.equality.keyed_rows import with_keys

MOST_RANKS = 4
"""Of the cases that are drawn."""

BATCHES = ("even", "uneven", "empty bags", "empty batch on one rank", "a rank with no ids")
"""The kinds of batches that a case may train on, one after the other."""

_FORMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda values: values,
    lambda values: values.new_tensor(0.3).expand(values.shape),  # of a sum: one value
    lambda values: torch.cat([values, values])[len(values) :],  # a part of a larger tensor
    lambda values: torch.complex(values, -values).conj().imag,  # every other value, negated when it is read
    lambda values: values.transpose(0, -1).contiguous().transpose(0, -1),
)
"""The forms in memory that torch hands gradients over in."""

VARIABLE = "a batch size per feature"
"""A further kind: each feature has its own samples, and inverse indices say which belong together."""


@frozen
class Table:
    """A table of a case and how it is sharded; ``rows``/``dim``/``features`` as in the configuration."""

    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str
    sharding_type: str
    kernel: str
    variant: int = 0
    offset: int = 0
    data_type: str = "FP32"


def _tables(values: Iterable[Table]) -> tuple[Table, ...]:
    return tuple(values)


def _sizes(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen
class Case:
    """Tables, an optimizer, and each rank's batch size.

    With `batches`, step `i` has the kind `batches[i]`, and `batch_sizes` are those of an uneven one. If a case
    `has_keys`, what is sharded are tables whose ids are keys, with room for all of them on each of `MOST_RANKS`, and
    row `r` of the unsharded module is what has key `r`. `constraints` is what is asked beside sharding type and kernel,
    `parameters` what the optimizer takes beside its learning rate.
    """

    tables: tuple[Table, ...] = field(converter=_tables)
    batch_sizes: tuple[int, ...] = field(converter=_sizes)
    optimizer: str = "sgd"
    is_weighted: bool = False
    max_length: int = 4
    local_world_size: int | None = None
    id_dtype: torch.dtype = torch.int64
    batches: tuple[str, ...] = ()
    has_keys: bool = False
    constraints: ParameterConstraints = field(factory=ParameterConstraints)
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.batch_sizes)

    @property
    def fused_params(self) -> dict[str, Any]:
        """Parameters of the optimizer, for the sharder."""
        return {"optimizer": self.optimizer, "learning_rate": 0.1, **dict(self.parameters)}

    @property
    def features(self) -> list[str]:
        """Every feature, and one that no table asks for."""
        names = {feature for table in self.tables for feature in table.features}
        return [*sorted(names, reverse=True), "unused"]

    @property
    def is_pooled(self) -> bool:
        """One vector a bag, else one an id."""
        return self.tables[0].pooling != "NONE"

    def _common(self, index: int, times: int) -> dict[str, Any]:
        table = self.tables[index]
        return {
            "num_embeddings": table.rows * times,
            "embedding_dim": table.dim,
            "name": f"t{index}",
            "feature_names": list(table.features),
            "data_type": table.data_type,
        }

    def module(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """The unsharded module, the same each time."""
        return self._module(times=1)

    def module_to_shard(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """The module that is sharded: the same, or, of keys, one of tables with more room."""
        return self._module(times=MOST_RANKS if self.has_keys else 1)

    def _module(self, times: int) -> EmbeddingBagCollection | EmbeddingCollection:
        module: EmbeddingBagCollection | EmbeddingCollection
        if self.is_pooled:
            bags = [
                EmbeddingBagConfig(pooling=table.pooling, **self._common(index, times))
                for index, table in enumerate(self.tables)
            ]
            module = EmbeddingBagCollection(bags, is_weighted=self.is_weighted, device="cpu")
        else:
            configs = [EmbeddingConfig(**self._common(index, times)) for index in range(len(self.tables))]
            module = EmbeddingCollection(configs, device="cpu")
        generator = torch.Generator().manual_seed(
            0
        )  # its own: simulated ranks are threads, and share torch's
        for weight in module.parameters():
            most = len(weight) ** -0.5
            nn.init.uniform_(weight, -most, most, generator)
        return module

    def sharder(self) -> ModuleSharder:
        """The sharder of such modules."""
        kind = EmbeddingBagCollectionSharder if self.is_pooled else EmbeddingCollectionSharder
        kernels = host().compute_kernels
        shown = {
            f"t{index}"
            for index, table in enumerate(self.tables)
            if not kernels[table.kernel].fuses_optimizer
        }
        return _leaving(shown, kind)(fused_params=self.fused_params)

    def specs(self) -> list[TableSpec]:
        """The specifications of the tables that are sharded."""
        return self.sharder().tables(self.module_to_shard())

    def output(self, result: Any) -> Tensor:
        """A result of the module as one tensor: pooled columns, or the sequences' rows, flat, one after the other."""
        if self.is_pooled:
            return result.values()
        return torch.cat([result[name].values().reshape(-1) for name in sorted(result.keys())])

    def batch_size(self, step: int, rank: int) -> int:
        """Return the number of samples of a rank in a step."""
        kind = self.kind(step)
        if kind == "empty batch on one rank" and rank == self.world_size - 1:
            return 0
        return self.batch_sizes[rank] if kind in ("uneven", VARIABLE) else max(self.batch_sizes)

    def kind(self, step: int) -> str:
        """The kind of the batches of a step."""
        return self.batches[step % len(self.batches)] if self.batches else "uneven"

    def sizes(self, step: int, rank: int) -> list[int]:
        """Return the number of samples of each feature; the first feature has one for each sample of the batch."""
        size = self.batch_size(step, rank)
        if self.kind(step) != VARIABLE:
            return [size] * len(self.features)
        return [
            size,
            *(1 + (step + rank + index) % size if size else 0 for index in range(len(self.features) - 1)),
        ]

    def lengths(self, step: int, rank: int, size: int, generator: torch.Generator) -> Tensor:
        """Draw the number of ids of each bag of a feature."""
        kind = self.kind(step)
        own = torch.randint(0, self.max_length + 1, (size,), generator=generator)
        if kind == "empty bags":
            own *= torch.randint(0, 2, own.shape, generator=generator)
        if kind == "a rank with no ids" and rank == 0:
            own.zero_()
        return own

    def batch(self, step: int, rank: int) -> KeyedJaggedTensor:
        """A rank's batch of a step, the same each time."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        values, lengths, sizes = [], [], self.sizes(step, rank)
        for feature, size in zip(self.features, sizes, strict=True):
            rows = self.rows_of(feature)
            own = self.lengths(step, rank, size, generator)
            lengths.append(own)
            values.append(torch.randint(0, rows, (int(own.sum()),), generator=generator))
        ids = torch.cat(values).to(self.id_dtype)
        weights = (
            torch.rand(ids.numel(), generator=generator, dtype=torch.float32) if self.is_weighted else None
        )
        return KeyedJaggedTensor(
            keys=self.features,
            values=ids,
            lengths=torch.cat(lengths).to(torch.int32),
            weights=weights,
            **self._variable(step, sizes, generator),
        )

    def _variable(self, step: int, sizes: Sequence[int], generator: torch.Generator) -> dict[str, Any]:
        """The arguments that say which samples of features with their own batch sizes belong together."""
        if self.kind(step) != VARIABLE:
            return {}
        places = [torch.randint(0, max(size, 1), (sizes[0],), generator=generator) for size in sizes]
        return {
            "stride_per_key_per_rank": [[size] for size in sizes],
            "inverse_indices": (self.features, torch.stack(places)),
        }

    def rows_of(self, feature: str) -> int:
        """Return the number of rows that a feature can look up: rows that all its tables have."""
        return min((table.rows for table in self.tables if feature in table.features), default=5)

    def batch_to_shard(self, step: int, rank: int) -> KeyedJaggedTensor:
        """The batch as the sharded module gets it, in every second step with features in the order of the tables."""
        batch = self.batch(step, rank)
        if step % 2 and self.kind(step) != VARIABLE:
            used = dict.fromkeys(feature for table in self.tables for feature in table.features)
            batch = batch.permute(list(map(self.features.index, used)))
        return with_keys(batch) if self.has_keys else batch

    def gradient(self, step: int, rank: int, like: Tensor) -> Tensor:
        """The gradient of the loss by an output, the same each time; in another form each step."""
        generator = torch.Generator().manual_seed(7_000_000 + 1000 * step + rank)
        values = torch.rand(like.shape, generator=generator, dtype=like.dtype) - 0.3
        return _FORMS[(step + rank) % len(_FORMS)](values)


def _leaving(names: Collection[str], kind: type[ModuleSharder]) -> type[ModuleSharder]:
    """Derive a sharder that gives some tables no optimizer: their kernels leave it to one outside of them."""

    class _Leaving(kind):  # type: ignore[misc, valid-type]
        def tables(self, module: nn.Module, path: str = "") -> list[TableSpec]:
            return [
                evolve(table, optimizer=ASSUMED) if table.name in names else table
                for table in super().tables(module, path)
            ]

    return _Leaving


def layouts_of(
    name: str,
    table: TableSpec,
    world_size: int,
    *,
    local_world_size: int | None = None,
    constraints: ParameterConstraints | None = None,
) -> list[Layout]:
    """The layouts that a registered sharding type offers for ``table`` on simulated hosts, by default one."""
    sharding_type: ShardingType = host().sharding_types.create(name)
    topology = _topology(world_size, local_world_size)
    return offered_layouts(
        sharding_type, table, topology, constraints or ParameterConstraints(min_partition=1)
    )


def offered_layouts(
    sharding_type: ShardingType, table: TableSpec, topology: Topology, constraints: ParameterConstraints
) -> list[Layout]:
    """The layouts that a sharding type offers; none where it says that it does not apply."""
    try:
        return list(sharding_type.layouts(table, topology, constraints))
    except UnsupportedError:
        return []


@cache
def _topology(world_size: int, local_world_size: int | None) -> Topology:
    return Topology(world_size=world_size, compute_device="cpu", local_world_size=local_world_size)


def shardings_of(case: Case, specs: Sequence[TableSpec]) -> dict[str, ParameterSharding]:
    """A plan for the case: what may go anywhere is dealt to ranks or hosts, beginning at the table's offset."""
    plan = {}
    for table, spec in zip(case.tables, specs, strict=True):
        choices = layouts_of(
            table.sharding_type,
            spec,
            case.world_size,
            local_world_size=case.local_world_size,
            constraints=evolve(case.constraints, min_partition=1, sharding_types=[table.sharding_type]),
        )
        layout = choices[table.variant % len(choices)]
        ranks = [_rank_of(block, index, table.offset, case) for index, block in enumerate(layout.blocks)]
        plan[spec.name] = ParameterSharding(table.sharding_type, table.kernel, layout.placed(ranks))
    return plan


def _rank_of(block: Block, index: int, offset: int, case: Case) -> int:
    if block.rank is not None:
        return block.rank
    if block.host_group is None:
        return (index + offset) % case.world_size
    host_size = case.local_world_size or case.world_size
    first = (block.host_group + offset) * host_size % case.world_size
    return first + (index % host_size if block.local_rank is None else block.local_rank)


def shard_case(case: Case, env: ShardingEnv, module: nn.Module) -> Any:
    """The case's module, sharded on one rank, on the environment's device."""
    sharder = case.sharder()
    return sharder.shard(module, shardings_of(case, sharder.tables(module)), env, env.device_type)
