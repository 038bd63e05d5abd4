"""The module that is exported: a model that takes plain tensors, and reads the rows of its tables from one of them.

Legend: F features, B samples, N ids of all features, K ids of a table that have rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor, nn
from torch.utils import _pytree

from shardwright import (
    InvalidInputError,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
    UnsupportedError,
)
from shardwright_serving.packages.rows_file import TableRows
from shardwright_serving.packages.served import Served
from shardwright_serving.rows.torch_rows import look_up, sum_bags


@define(eq=False)
class Rows:
    """The mapped rows that the collections of a program read in this call."""

    file: Tensor | None = None


class MappedCollection(nn.Module):
    """The place of a collection of tables in a program: lookups in mapped rows.

    Args:
        served: description of the collection.
        tables: its tables in the file, in order.
        rows: holder of the mapped file.
    """

    def __init__(self, served: Served, tables: Sequence[TableRows], rows: Rows) -> None:
        super().__init__()
        self._served, self._tables, self._rows = served, list(tables), rows
        for number, table in enumerate(self._tables):
            # Not persistent: they are in no checkpoint of the model.
            self.register_buffer(f"known_{number}", served.known_ids(table.name), persistent=False)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor | dict[str, JaggedTensor]:
        """Look up as the collection does that was exported."""
        bags = features.to_dict()
        assert self._rows.file is not None  # the program has set it
        found: list[tuple[JaggedTensor, Tensor]] = []
        for number, (config, table) in enumerate(zip(self._served.configs, self._tables, strict=True)):
            rows = table.of(self._rows.file)
            for name in config.feature_names:
                ids = self._row_numbers(number, bags[name].values().long())
                found.append((bags[name], self._looked_up(table, rows, ids, bags[name])))
        names = self._served.embedding_names
        if self._served.is_pooled:
            pooled = [self._pooled(*one, index) for index, one in enumerate(found)]
            return KeyedTensor(names, [one.shape[1] for one in pooled], torch.cat(pooled, dim=1))
        return {name: self._sequence(*one) for name, one in zip(names, found, strict=True)}

    def _row_numbers(self, number: int, ids: Tensor) -> Tensor:
        """Row of each id, ``[N]``; where some ids alone have rows, the last for others, which is zeros."""
        known: Tensor | None = getattr(self, f"known_{number}")
        if known is None:
            return ids
        if not len(known):
            return torch.zeros_like(ids)
        place = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        return torch.where(known[place] == ids, place, len(known))

    def _looked_up(self, table: TableRows, rows: Tensor, ids: Tensor, bags: JaggedTensor) -> Tensor:
        if not self._served.is_pooled:
            return look_up(table.data_type.value, table.embedding_dim, rows, ids)
        weights = bags.weights().float() if self._served.is_weighted else None
        offsets = bags.offsets().long()
        return sum_bags(table.data_type.value, table.embedding_dim, rows, ids, offsets, weights)

    def _pooled(self, bags: JaggedTensor, sums: Tensor, output: int) -> Tensor:
        if self._served.poolings[output] is PoolingType.MEAN:
            sums = sums / bags.lengths().clamp(min=1).unsqueeze(1)
        return sums.to(self._served.output_dtype)

    def _sequence(self, bags: JaggedTensor, rows: Tensor) -> JaggedTensor:
        ids = bags.values() if self._served.need_indices else None
        return JaggedTensor(rows.to(self._served.output_dtype), lengths=bags.lengths(), weights=ids)


def without_tables(
    model: nn.Module, served: Mapping[str, Served], tables: Mapping[str, Sequence[TableRows]], rows: Rows
) -> nn.Module:
    """A copy of a model for one thread's inference, whose collections read mapped rows; tables are not copied.

    Args:
        model: the model, sharded modules in it or not.
        served: its collections by path.
        tables: places of their tables, by path.
        rows: holder of the mapped file.
    """
    instead = {id(one.module): MappedCollection(one, tables[path], rows) for path, one in served.items()}
    return copy.deepcopy(model, instead).eval().requires_grad_(False)


@frozen(eq=False)
class Inputs:
    """The arguments of a model's call, of which some are inputs of its program.

    Args:
        spec: structure of the arguments, ``(args, kwargs)``.
        leaves: the arguments; ``None`` where the batch and the dense input stand.
        batch: position of the `KeyedJaggedTensor`.
        dense: position of the dense input; ``None`` if there is none.
        dense_name: name of the dense input.
        keys: the F features, in order.
        is_weighted: ids carry weights.
        example: the tensors of the example, in the order of the program's inputs.
    """

    spec: Any
    leaves: Sequence[Any]
    batch: int
    dense: int | None
    dense_name: str
    keys: Sequence[str]
    is_weighted: bool
    example: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, example: Any) -> Inputs:
        """Read them from an example.

        Args:
            model: the model that is called with it.
            example: a `KeyedJaggedTensor`, the model's arguments as a tuple, or as a mapping by name.

        Raises:
            InvalidInputError: it has no `KeyedJaggedTensor`, or one that tables cannot look up.
            UnsupportedError: it has more than one, batch sizes of their own, or further tensors than a dense one.
        """
        args, kwargs = _arguments(example)
        found, spec = _pytree.tree_flatten_with_path((args, kwargs), is_leaf=_is_batch)
        leaves = [leaf for _, leaf in found]
        batches = [at for at, leaf in enumerate(leaves) if _is_batch(leaf)]
        dense = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        _check_example(leaves, batches, dense)
        batch: KeyedJaggedTensor = leaves[batches[0]]
        tensors = {"values": batch.values().long(), "lengths": batch.lengths().long()}
        if batch.weights_or_none() is not None:
            tensors["weights"] = batch.weights().float()
        name = ""
        if dense:
            name = _name_of(model, found[dense[0]][0])
            tensors["dense"] = leaves[dense[0]].float()
        for at in (*batches, *dense):
            leaves[at] = None
        return cls(
            spec,
            leaves,
            batches[0],
            dense[0] if dense else None,
            name,
            batch.keys(),
            "weights" in tensors,
            {key: tensor.detach().cpu() for key, tensor in tensors.items()},
        )

    def call(self, model: nn.Module, batch: KeyedJaggedTensor, dense: Tensor | None) -> Any:
        """Call a model with other inputs in the places of the example's."""
        leaves = list(self.leaves)
        leaves[self.batch] = batch
        if self.dense is not None:
            leaves[self.dense] = dense
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        return model(*args, **kwargs)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def _is_batch(value: Any) -> bool:
    return isinstance(value, KeyedJaggedTensor)


def _check_example(leaves: Sequence[Any], batches: Sequence[int], dense: Sequence[int]) -> None:
    if not batches:
        raise InvalidInputError(
            "the example has no KeyedJaggedTensor: give one, or the model's arguments as a tuple or by name"
        )
    if len(batches) > 1 or len(dense) > 1 or (dense and leaves[dense[0]].dim() != 2):
        shapes = [list(leaves[at].shape) for at in dense]
        raise UnsupportedError(
            f"the example has {len(batches)} KeyedJaggedTensors and tensors of shapes {shapes}; a package takes one "
            "of the former and at most one dense tensor [samples, columns]: wrap the model in one that takes these"
        )
    batch = leaves[batches[0]]
    if batch.variable_stride_per_key():
        raise UnsupportedError(
            "the example's features have batch sizes of their own; a package takes the same samples of every feature"
        )
    problem = batch.lookup_problem(batch.keys())
    if problem:
        raise InvalidInputError(f"the example: {problem}")
    if dense and len(leaves[dense[0]]) != batch.stride():
        raise InvalidInputError(
            f"the example's dense tensor has {len(leaves[dense[0]])} rows, and its KeyedJaggedTensor {batch.stride()} "
            "samples; give both as many"
        )


def _name_of(model: nn.Module, path: Any) -> str:
    """The name of an argument: of the model's parameter if it is one by itself."""
    _, own, *inner = path
    key = getattr(own, "key", getattr(own, "idx", None))
    names = list(inspect.signature(model.forward).parameters)
    if inner or (isinstance(key, int) and key >= len(names)):
        return "dense"
    return names[key] if isinstance(key, int) else str(key)


def _key_of(step: Any) -> str:
    """The key, index or attribute that a step of a path in a structure takes."""
    return str(next(getattr(step, name) for name in ("key", "idx", "name") if hasattr(step, name)))


class ServingProgram(nn.Module):
    """A model that takes ``values [N]``, ``lengths [F * B]``, perhaps weights and dense, and the mapped rows.

    Args:
        model: the model, whose collections read mapped rows.
        inputs: its arguments.
        rows: holder of the mapped file.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, rows: Rows) -> None:
        super().__init__()
        self.model = model
        self._inputs, self._rows = inputs, rows

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Predict; outputs ``[B, ...]`` in the order in which the model's output has them."""
        return tuple(_pytree.tree_leaves(self._output(tensors)))

    def named_outputs(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Predict; outputs by their names in the structure of the model's output, such as ``score`` or ``scores.0``.

        Raises:
            UnsupportedError: two outputs have one name.
        """
        found, _ = _pytree.tree_flatten_with_path(self._output(tensors))
        named: dict[str, Tensor] = {}
        for path, leaf in found:
            name = ".".join(map(_key_of, path)) or "output"
            if name in named:
                raise UnsupportedError(
                    f"the model has two outputs {name!r}: rename one, since requests name them so"
                )
            named[name] = leaf
        return named

    def _output(self, tensors: Sequence[Tensor]) -> Any:
        named = dict(zip([*self._inputs.example, "rows"], tensors, strict=True))
        self._rows.file = named["rows"]
        batch = KeyedJaggedTensor(
            self._inputs.keys, named["values"], named.get("weights"), lengths=named["lengths"]
        )
        return self._inputs.call(self.model, batch, named.get("dense"))
