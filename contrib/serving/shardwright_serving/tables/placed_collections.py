"""Quantized collections cut over the devices of one process.

Legend: B batch size, D columns of a table, N ids of a feature.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from shardwright import (
    Block,
    EmbeddingBagConfig,
    EmbeddingConfig,
    InvalidInputError,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    ParameterSharding,
    PlanError,
    PoolingType,
    TableCollection,
    TableSpec,
    UnsupportedError,
)
from shardwright_serving.rows.quantized_rows import QuantizedRows
from shardwright_serving.tables.collections import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    inverse_lengths,
)
from shardwright_serving.tables.quantized_collection import QuantizedCollection


@frozen(eq=False)
class _Shard:
    """A block of a table as a small table of its own.

    Args:
        table: number of the table.
        block: its rows and columns.
        config: configuration of the small table, whose features are slots.
        device: number of its device.
    """

    table: int
    block: Block
    config: EmbeddingConfig
    device: int

    @property
    def is_cut(self) -> bool:
        """True if its rows are a part of the table's."""
        return self.block.rows.row_map.num_parts > 1

    @property
    def columns(self) -> slice:
        """Its columns in the table."""
        return slice(self.block.columns.start, self.block.columns.stop)

    def mine(self, ids: Tensor) -> Tensor:
        """Mask of the ids whose rows are here: ``[N]``."""
        mask: Tensor = self.block.rows.row_map.part_of(ids) == self.block.rows.index
        return mask


class PlacedCollection(TableCollection):
    """The common part of placed collections: on each device a quantized collection of shards.

    Args:
        collection: the collection that is cut; nothing depends on it afterwards.
        params: table name -> how it is cut.
        devices: device of each rank, or of all.
        path: path of the collection in its model.
    """

    def __init__(
        self,
        collection: QuantizedCollection,
        params: Mapping[str, ParameterSharding],
        devices: Sequence[torch.device],
        path: str,
    ) -> None:
        super().__init__(collection.tables, collection.config_type)
        specs = [TableSpec.from_config(table, module=path) for table in collection.tables]
        _check_plan_covers(specs, params, path)
        self._tables, self._is_weighted = list(collection.tables), collection.is_weighted()
        self.output_dtype = collection.output_dtype
        self._like = [
            collection.of_tables(collection.tables, "meta")
        ]  # in a list: it is no part of this module
        self._devices = list(dict.fromkeys(devices))
        self._shards = [
            shard
            for number, spec in enumerate(specs)
            for shard in self._cut(number, spec, params[spec.name], devices)
        ]
        made = [self._collection_of(number) for number in range(len(self._devices))]
        self.shards = nn.ModuleList([nn.Identity() if held is None else held for held in made])
        for shard in self._shards:
            rows = collection.quantized_rows(self._tables[shard.table].name)
            own = rows.rows(_row_index(shard.block)).columns(shard.columns.start, shard.columns.stop)
            self._set_rows(shard, own, rows)
        for held in filter(None, made):
            held.use_kernel(self._kernels_of(held, params))

    def _cut(
        self, number: int, spec: TableSpec, sharding: ParameterSharding, devices: Sequence[torch.device]
    ) -> Iterator[_Shard]:
        layout = sharding.layout
        if layout.row_map.takes_any_id:
            raise UnsupportedError(
                f"table {spec.describe()} cannot be cut by {sharding.sharding_type!r}: its ids are keys, and quantized "
                "tables have rows"
            )
        ranks = 1 + max(block.rank or 0 for block in layout.blocks)
        try:
            layout.check(spec, world_size=ranks)
        except ValueError as error:
            raise PlanError(f"the plan of table {spec.path!r} ({sharding.sharding_type}): {error}") from error
        if 1 < len(devices) < ranks:
            raise InvalidInputError(
                f"table {spec.describe()} is planned for {ranks} ranks, and there are {len(devices)} devices: give one "
                "for each rank, or one for all"
            )
        seen: set[tuple[int, int]] = set()
        for block in layout.blocks:
            place = (block.rows.index, block.columns.start)
            if place in seen or block.num_rows == 0:  # of copies one; fewer rows than parts
                continue
            seen.add(place)
            name = f"{number}_{len(seen) - 1}"
            config = evolve(
                self._tables[number],
                name=name,
                num_embeddings=block.num_rows,
                embedding_dim=block.num_columns,
                feature_names=[f"{name}_{index}" for index in range(spec.num_features)],
            )
            device = devices[0] if len(devices) == 1 else devices[block.rank or 0]
            yield _Shard(number, block, config, self._devices.index(device))

    def _collection_of(self, number: int) -> QuantizedCollection | None:
        """The shards of a device; ``None`` if it has none."""
        configs = [shard.config for shard in self._shards if shard.device == number]
        return self._made(configs) if configs else None

    @abstractmethod
    def _made(self, configs: list[Any]) -> QuantizedCollection:
        """A quantized collection of a device's shards, on ``meta`` until their rows are set."""

    def _kernels_of(
        self, held: QuantizedCollection, params: Mapping[str, ParameterSharding]
    ) -> dict[str, str]:
        """The kernel of each shard on a device, as the plan names that of its table."""
        names = {
            shard.config.name: params[self._tables[shard.table].name].compute_kernel for shard in self._shards
        }
        return {table.name: names[table.name] for table in held.tables if names[table.name]}

    def _set_rows(self, shard: _Shard, rows: QuantizedRows, whole: QuantizedRows) -> None:
        """Set the rows of a shard; those that share memory with the whole table's are copied."""
        held = self.shards[shard.device]
        assert isinstance(held, QuantizedCollection)
        stored, device = rows.packed(), self._devices[shard.device]
        is_shared = stored.untyped_storage().data_ptr() == whole.packed().untyped_storage().data_ptr()
        held.set_rows(shard.config.name, evolve(rows, stored=stored.to(device, copy=is_shared)))

    def __prepare_scriptable__(self) -> nn.Module:
        """The module that `torch.jit.script` compiles in the place of this one, of whole tables."""
        from shardwright_serving.scripting.quantized import scriptable  # asked for by few

        return scriptable(self, self._tables, self.quantized_rows)

    def quantized_rows(self, table: str) -> QuantizedRows:
        """The rows of a table, put together from its shards in new host memory.

        Raises:
            UnknownNameError: there is no such table.
        """
        self._like[0].table_weight(table)  # which knows the names
        number = [config.name for config in self._tables].index(table)
        shards = [shard for shard in self._shards if shard.table == number]
        parts = [evolve(part, stored=part.packed().cpu()) for part in self.blocks_of(table)]
        config, first = self._tables[number], parts[0]
        elements = first.values.new_zeros(config.num_embeddings, config.embedding_dim)
        header = torch.zeros(config.num_embeddings, 2, dtype=torch.float16)
        for shard, part in zip(shards, parts, strict=True):
            rows = torch.arange(config.num_embeddings)[_row_index(shard.block)]
            own = part.values
            # Torch cannot put elements of FP8 at places, but their bytes.
            kind = own.dtype if own.element_size() > 1 else torch.uint8
            elements.view(kind)[rows, shard.columns] = own.view(kind)
            header[rows] = torch.cat([part.scale, part.bias], dim=1)
        return QuantizedRows.of(first.data_type, elements, header[:, :1], header[:, 1:])

    @property
    def tables(self) -> Sequence[EmbeddingConfig]:
        """The tables' configurations, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """True if each id must carry a weight."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Device of the first rank's shards."""
        return self._devices[0]

    def table_weight(self, table: str) -> Tensor:
        """The stored rows of a table; see :meth:`quantized_rows`."""
        return self.quantized_rows(table).stored

    def of_tables(self, tables: Sequence[Any], device: torch.device | str | None = None) -> TableCollection:
        """A collection of other tables that is not cut."""
        return self._like[0].of_tables(tables, device)

    def blocks_of(self, table: str) -> list[QuantizedRows]:
        """The rows of each shard of a table."""
        found = []
        for shard in self._shards:
            if self._tables[shard.table].name == table:
                held = self.shards[shard.device]
                assert isinstance(held, QuantizedCollection)
                found.append(held.quantized_rows(shard.config.name))
        return found

    def _results(
        self, features: KeyedJaggedTensor
    ) -> Iterator[tuple[_Shard, int, JaggedTensor, Tensor | None, Any]]:
        """Shard, number of its feature, the feature's bags, a mask of its ids, and result: for each slot."""
        found_bags = iter(self.bags_of(features))
        if features.variable_stride_per_key():
            raise UnsupportedError(
                f"{type(self).__name__}: features have batch sizes of their own: give every feature all samples"
            )
        bags = [[next(found_bags)[2] for _ in table.feature_names] for table in self._tables]
        slots = {
            (id(shard), index): _slot_of(shard, jagged)
            for shard in self._shards
            for index, jagged in enumerate(bags[shard.table])
        }
        found = [self._looked_up(number, slots) for number in range(len(self._devices))]
        for shard in self._shards:
            for index, jagged in enumerate(bags[shard.table]):
                result = found[shard.device][shard.config.feature_names[index]]
                yield shard, index, jagged, slots[id(shard), index][1], result

    def _looked_up(self, number: int, slots: Mapping[tuple[int, int], tuple[JaggedTensor, Any]]) -> Any:
        """Results of a device's shards."""
        own = {
            shard.config.feature_names[index]: slots[id(shard), index][0]
            for shard in self._shards
            if shard.device == number
            for index in range(len(shard.config.feature_names))
        }
        if not own:
            return {}
        weights = [jagged.weights_or_none() for jagged in own.values()] if self._is_weighted else []
        joined = KeyedJaggedTensor(
            list(own),
            torch.cat([jagged.values() for jagged in own.values()]),
            torch.cat([one for one in weights if one is not None]) if weights else None,
            torch.cat([jagged.lengths() for jagged in own.values()]),
        )
        return self.shards[number](joined.to(self._devices[number]))


def _check_plan_covers(
    specs: Sequence[TableSpec], params: Mapping[str, ParameterSharding], path: str
) -> None:
    names = [spec.name for spec in specs]
    if set(names) != set(params):
        raise InvalidInputError(
            f"the plan of module {path!r} has the tables {', '.join(sorted(params))}; the module has "
            f"{', '.join(sorted(names))}"
        )


def _row_index(block: Block) -> slice | Tensor:
    """The rows of the table that a block has."""
    rows = block.rows.rows
    return rows if isinstance(rows, slice) else torch.as_tensor(rows)


def _slot_of(shard: _Shard, bags: JaggedTensor) -> tuple[JaggedTensor, Tensor | None]:
    """The part of a feature's bags that a shard has, its ids rows there, and a mask of the ids; ``None`` for all."""
    if not shard.is_cut:
        return bags, None
    ids = bags.values().long()
    mask = shard.mine(ids)
    before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.long().cumsum(0)])
    weights = bags.weights_or_none()
    lengths = before[bags.offsets().long()].diff()
    own = shard.block.rows.row_map.local_row_of(ids[mask])
    return JaggedTensor(own, lengths=lengths, weights=None if weights is None else weights[mask]), mask


class PlacedQuantEmbeddingBagCollection(PlacedCollection):
    """A :class:`QuantEmbeddingBagCollection` cut over the devices of one process."""

    def _made(self, configs: list[Any]) -> QuantizedCollection:
        sums = [evolve(config, pooling=PoolingType.SUM) for config in configs]
        return QuantEmbeddingBagCollection(sums, self._is_weighted, "meta")

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag; see `EmbeddingBagCollection.forward`."""
        dims = [table.embedding_dim for table in self._tables for _ in table.feature_names]
        firsts = [0, *accumulate(table.embedding_dim * len(table.feature_names) for table in self._tables)]
        whole = torch.zeros(features.stride(), sum(dims), device=features.device())
        for shard, index, bags, _, found in self._results(features):
            table = self._tables[shard.table]
            first = firsts[shard.table] + index * table.embedding_dim
            sums = found.to(whole.device)
            if (
                isinstance(table, EmbeddingBagConfig)
                and table.pooling is PoolingType.MEAN
                and not shard.is_cut
            ):
                sums = sums * inverse_lengths(bags.lengths())
            whole[:, first + shard.columns.start : first + shard.columns.stop] += sums
        self._divide_cut(whole, firsts, features)
        return KeyedTensor(self.embedding_names(), dims, whole.to(self.output_dtype))

    def _divide_cut(self, whole: Tensor, firsts: list[int], features: KeyedJaggedTensor) -> None:
        """Divide the sums of means whose rows are cut, once they are whole."""
        cut = {shard.table for shard in self._shards if shard.is_cut}
        for number in cut:
            table = self._tables[number]
            if isinstance(table, EmbeddingBagConfig) and table.pooling is PoolingType.MEAN:
                for index, name in enumerate(table.feature_names):
                    first = firsts[number] + index * table.embedding_dim
                    lengths = features[name].lengths()
                    whole[:, first : first + table.embedding_dim] *= inverse_lengths(lengths)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configurations, in order."""
        return [table for table in self._tables if isinstance(table, EmbeddingBagConfig)]


class PlacedQuantEmbeddingCollection(PlacedCollection):
    """A :class:`QuantEmbeddingCollection` cut over the devices of one process."""

    def __init__(self, collection: QuantizedCollection, *args: Any) -> None:
        super().__init__(collection, *args)
        assert isinstance(collection, QuantEmbeddingCollection)  # place_collection
        self._need_indices = collection.need_indices()

    def _made(self, configs: list[Any]) -> QuantizedCollection:
        return QuantEmbeddingCollection(configs, "meta")

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up each id; see `EmbeddingCollection.forward`."""
        numbers = [0, *accumulate(len(table.feature_names) for table in self._tables)]
        made: dict[int, tuple[JaggedTensor, Tensor]] = {}
        for shard, index, bags, mask, found in self._results(features):
            output, table = numbers[shard.table] + index, self._tables[shard.table]
            if output not in made:
                made[output] = (
                    bags,
                    torch.zeros(bags.values().numel(), table.embedding_dim, device=features.device()),
                )
            rows = made[output][1]
            values = found.values().to(rows.device)
            if mask is None:
                rows[:, shard.columns] = values
            else:
                rows[mask, shard.columns] = values
        return {
            name: JaggedTensor(
                made[output][1].to(self.output_dtype),
                lengths=made[output][0].lengths(),
                weights=made[output][0].values() if self._need_indices else None,
            )
            for output, name in enumerate(self.embedding_names())
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configurations, in order."""
        return self._tables

    def need_indices(self) -> bool:
        """True if outputs carry the ids as their weights."""
        return self._need_indices
