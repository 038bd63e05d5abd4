"""Collections of quantised tables, under TorchRec's names: `torch.quantization` puts them in the place of the others.

Legend: B batch size, D columns of a table, N ids of a feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright_torchrec.quant.lookups import Lookup, Slot, lookup_of
from shardwright_torchrec.quant.rows import QuantizedBlock, quantize_rows

__all__ = ["QuantConfig", "QuantEmbeddingBagCollection", "QuantEmbeddingCollection", "QuantizedCollection"]

WEIGHT_TYPES = (torch.int8, torch.qint8, torch.quint8)
OUTPUT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class QuantConfig(NamedTuple):
    """Types that modules are quantised to: classes of observers with a ``dtype``, as in `torch.quantization`."""

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch.dtype] | None = None


class QuantizedCollection(nn.Module, ABC):
    """The common part of collections of quantised tables.

    Args:
        like: the collection that was quantised, on which nothing depends any more.
        blocks: the quantised blocks of each table, in the order of the tables.
        output_dtype: dtype of the results.
    """

    is_pooled: ClassVar[bool]
    blocks_attribute: ClassVar[str]
    """Under which name the blocks stand among the buffers: that of the collection that was quantised."""

    def __init__(
        self, like: Any, blocks: Mapping[str, Sequence[QuantizedBlock]], output_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._tables = list(like.tables)
        self._names = like.embedding_names_by_table()
        self._is_weighted = self.is_pooled and like.is_weighted()
        self._output_dtype = output_dtype
        modules = {name: own[0] if len(own) == 1 else nn.ModuleList(own) for name, own in blocks.items()}
        self.add_module(self.blocks_attribute, nn.ModuleDict(modules))
        self._blocks = {name: list(own) for name, own in blocks.items()}
        self._lookup: Lookup | None = None
        self.register_load_state_dict_post_hook(_forget_lookup)

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> Self:
        """Quantise a collection; `torch.quantization` calls it.

        Args:
            module: a float collection, whose ``qconfig`` names the types.
            use_precomputed_fake_quant: ignored.

        Raises:
            InvalidInputError: it has no ``qconfig``, or its weights are on no device.
            UnsupportedError: another type than 8-bit integers is asked for.
        """
        config = getattr(module, "qconfig", None)
        if config is None:
            raise sw.InvalidInputError(
                f"{type(module).__name__} has no qconfig: give it to quantize_dynamic(qconfig_spec=...)"
            )
        _check_types(module, config)
        if module.device.type == "meta":
            raise sw.InvalidInputError("tables on the device 'meta' have no weights to quantise")
        blocks = {
            table.name: [QuantizedBlock(quantize_rows(module.table_weight(table.name)))]
            for table in module.tables
        }
        return cls(module, blocks, config.activation().dtype)

    @property
    def tables(self) -> Sequence[Any]:
        """The tables' configurations, in order."""
        return self._tables

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._blocks[self._tables[0].name][0].weight.device

    def embedding_names(self) -> list[str]:
        """The names of the outputs: tables in order, features in order within a table."""
        return [name for names in self._names for name in names]

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the outputs of each table."""
        return [list(names) for names in self._names]

    def is_weighted(self) -> bool:
        """True if each id must carry a weight."""
        return self._is_weighted

    def blocks_of(self, table: str) -> Sequence[QuantizedBlock]:
        """The quantised blocks of a table."""
        return self._blocks[table]

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of the results."""
        return self._output_dtype

    @abstractmethod
    def forward(self, features: sw.KeyedJaggedTensor) -> Any:
        """Look up; see the classes."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the lookup, which is made anew from the buffers."""
        return {**self.__dict__, "_lookup": None}

    def _current_lookup(self) -> Lookup:
        if self._lookup is None or not self._lookup.is_current:
            blocks = [
                block
                for table in self._tables
                for block in self._blocks[table.name]
                for _ in table.feature_names
            ]
            self._lookup = lookup_of(blocks, is_pooled=self.is_pooled)
        return self._lookup

    def _looked_up(self, features: sw.KeyedJaggedTensor) -> list[tuple[Any, sw.JaggedTensor, Tensor]]:
        """Table, bags and result of each output, in order: sums ``[B, D]``, or rows ``[N, D]``."""
        problem = features.lookup_problem([name for table in self._tables for name in table.feature_names])
        if problem:
            raise sw.InvalidInputError(f"{type(self).__name__}: {problem}")
        by_feature = features.to_dict()
        bags = {
            (table.name, feature): _checked(by_feature, feature, table, is_weighted=self._is_weighted)
            for table in self._tables
            for feature in table.feature_names
        }
        slots, masks = [], []
        for table in self._tables:
            for block in self._blocks[table.name]:
                for feature in table.feature_names:
                    slot, mask = _slot_of(block, bags[table.name, feature], self._is_weighted)
                    slots.append(slot)
                    masks.append(mask)
        parts = iter(zip(self._current_lookup()(slots), masks, strict=True))
        found = []
        for table in self._tables:
            own = self._blocks[table.name]
            by_block = [[next(parts) for _ in table.feature_names] for _ in own]
            for index, feature in enumerate(table.feature_names):
                jagged = bags[table.name, feature]
                pieces = [(block, *made[index]) for block, made in zip(own, by_block, strict=True)]
                found.append((table, jagged, self._joined(table, jagged, pieces)))
        return found

    def _joined(self, table: Any, bags: sw.JaggedTensor, pieces: Sequence[tuple[Any, Tensor, Any]]) -> Tensor:
        """Join the results of a table's blocks: sums are added, rows of ids put at their places."""
        if len(pieces) == 1:
            return pieces[0][1]
        count = len(bags.lengths()) if self.is_pooled else len(bags.values())
        whole = pieces[0][1].new_zeros(count, table.embedding_dim)
        for block, values, mask in pieces:
            if self.is_pooled or mask is None:
                whole[:, block.columns] += values
            else:
                whole[mask, block.columns] = values
        return whole


class QuantEmbeddingBagCollection(QuantizedCollection):
    """`EmbeddingBagCollection` with rows of one byte a column."""

    is_pooled = True
    blocks_attribute = "embedding_bags"

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedTensor:
        """Pool the rows of each bag: ``[B, D]`` under the names of the outputs; an empty bag gives zeros.

        Raises:
            UnknownNameError: a feature is missing.
            InvalidInputError: an id is out of range, or the collection is weighted and the input is not.
            UnsupportedError: features have batch sizes of their own.
        """
        if features.inverse_indices_or_none() is not None:
            raise sw.UnsupportedError(
                f"{type(self).__name__}: features have batch sizes of their own, for which quantised tables have no "
                "lookup: give every feature all samples"
            )
        columns = []
        for table, bags, sums in self._looked_up(features):
            if table.pooling is sw.PoolingType.MEAN:
                sums = sums / bags.lengths().clamp(min=1).unsqueeze(1)
            columns.append(sums.to(self._output_dtype))
        return sw.KeyedTensor(
            keys=self.embedding_names(),
            length_per_key=[one.shape[1] for one in columns],
            values=torch.cat(columns, dim=1),
        )

    def embedding_bag_configs(self) -> list[Any]:
        """The tables' configurations, in order."""
        return self._tables


class QuantEmbeddingCollection(QuantizedCollection):
    """`EmbeddingCollection` with rows of one byte a column."""

    is_pooled = False
    blocks_attribute = "embeddings"

    def forward(self, features: sw.KeyedJaggedTensor) -> dict[str, sw.JaggedTensor]:
        """The row of each id: ``[N, D]`` under the names of the outputs, with the input's lengths.

        Raises:
            UnknownNameError: a feature is missing.
            InvalidInputError: an id is out of range.
        """
        found = self._looked_up(features)
        return {
            name: sw.JaggedTensor(values=rows.to(self._output_dtype), lengths=bags.lengths())
            for name, (_, bags, rows) in zip(self.embedding_names(), found, strict=True)
        }

    def embedding_configs(self) -> list[Any]:
        """The tables' configurations, in order."""
        return self._tables


def _forget_lookup(module: Any, _: object) -> None:
    module._lookup = None


def _check_types(module: Any, config: Any) -> None:
    asked = {"": config.weight().dtype, **(getattr(config, "per_table_weight_dtype", None) or {})}
    for table, dtype in asked.items():
        if dtype not in WEIGHT_TYPES:
            raise sw.UnsupportedError(
                f"{f'table {table!r}' if table else 'tables'} cannot be quantised to {dtype}; 8-bit integers it can "
                f"be: {', '.join(map(str, WEIGHT_TYPES))}"
            )
    if config.activation().dtype not in OUTPUT_TYPES:
        raise sw.UnsupportedError(
            f"results of {type(module).__name__} cannot be {config.activation().dtype}; they can be "
            f"{', '.join(map(str, OUTPUT_TYPES))}"
        )


def _checked(
    by_feature: Mapping[str, sw.JaggedTensor], feature: str, table: Any, *, is_weighted: bool
) -> sw.JaggedTensor:
    """A feature's bags: they are there, with weights if need be, and their ids are rows."""
    if feature not in by_feature:
        raise sw.UnknownNameError(
            f"feature {feature!r} of table {table.name!r} is not in the input, which has "
            f"{', '.join(sorted(by_feature))}"
        )
    bags = by_feature[feature]
    if is_weighted and bags.weights_or_none() is None:
        raise sw.InvalidInputError(f"feature {feature!r} of table {table.name!r} has no weights")
    if len(bags.values()):
        least, most = (int(extreme) for extreme in bags.values().aminmax())
        if least < 0 or most >= table.num_embeddings:
            raise sw.InvalidInputError(
                f"feature {feature!r} of table {table.name!r} has the id {least if least < 0 else most}; ids must be "
                f"0 <= id < {table.num_embeddings}"
            )
    return bags


def _slot_of(block: QuantizedBlock, bags: sw.JaggedTensor, is_weighted: bool) -> tuple[Slot, Tensor | None]:
    """Select the part of a feature's bags that a block has, and a mask of its ids; ``None`` if it has all."""
    ids, offsets = bags.values().long(), bags.offsets().long()
    weights = bags.weights_or_none().float() if is_weighted else None
    mask = block.is_mine(ids)
    if mask is not None:
        before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.long().cumsum(0)])
        ids, offsets = ids[mask], before[offsets]
        weights = None if weights is None else weights[mask]
    return Slot(block.local(ids), offsets, weights), mask
