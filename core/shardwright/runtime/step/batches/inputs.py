"""Checks of a batch before it is routed, so that bad input on one rank is an error on all, in the same step.

The rank with the bad batch gets an exception. The others learn of it from a status word (see
:mod:`shardwright.runtime.ranks.lockstep`).

Legend: F features, N ids.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import NoReturn

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from shardwright.arguments import some
from shardwright.errors import InvalidInputError, nearest
from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.devices import Constant, is_host, read_on_host, sent_to
from shardwright.runtime.step.batches.ranges import ANY, are_in_range, out_of_range
from shardwright.runtime.step.batches.rank_problems import BatchProblem, IdProblem
from shardwright.runtime.step.collection import Collection, FeatureBatch
from shardwright.runtime.step.segments import (
    LastResult,
    filled_up,
    index_of,
    starts_of,
    take,
    total,
)
from shardwright.settings import CHECKS_VARIABLE
from shardwright.sparse import WEIGHTS, KeyedJaggedTensor


class InputChecks(IntEnum):
    """Levels of checks of a batch.

    ``off``: only what routing needs. Every feature is there, and ids have weights where the collection is weighted.
    An id out of range is undefined behaviour, as in FBGEMM.

    ``standard``: also the range of every id.

    ``strict``: unused input is refused (features of no table, weights of an unweighted collection), and weights must be
    finite.

    ``warning``: as ``standard``, but an id out of range is looked up as id 0, with a warning for each feature that has
    some. ``ignore``: likewise, without a warning. FBGEMM's ``BoundsCheckMode`` has modes of these names.
    """

    OFF = 0
    STANDARD = 1
    STRICT = 2
    WARNING = 3
    IGNORE = 4

    @classmethod
    def of(cls, name: str | None, environment: Mapping[str, str] = os.environ) -> InputChecks:
        """The level of that name; by default the one that ``SHARDWRIGHT_INPUT_CHECKS`` names, else ``standard``.

        Raises:
            InvalidInputError: there is no level of that name.
        """
        told = name if name is not None else environment.get(CHECKS_VARIABLE) or cls.STANDARD.name
        if told.upper() not in cls.__members__:
            known = [member.lower() for member in cls.__members__]
            where = "input_checks" if name is not None else CHECKS_VARIABLE
            raise InvalidInputError(
                f"{where} is {told!r}; it must be one of {', '.join(known)}.{nearest(told, known)}"
            )
        return cls[told.upper()]


@frozen(eq=False)
class _Keys:
    """Facts that follow from the keys of a batch. Keys are usually the same in every step, so these are kept.

    Args:
        keys: the batch's keys.
        places: place of each feature of the collection among the keys, ``[F]``.
        in_order: the keys are the collection's features, in its order.
        highest: last row of the smallest table that each key is looked up in; -1 if there is none.
    """

    keys: Sequence[str]
    places: Sequence[int]
    in_order: bool
    highest: Tensor
    last: LastResult = field(factory=LastResult, init=False)
    _constants: tuple[Constant, Constant] = field(init=False)

    @_constants.default
    def _both(self) -> tuple[Constant, Constant]:
        return Constant(self.highest), Constant(np.array(self.places, dtype=np.int64))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``highest`` and ``places`` on a device, which they are copied to once."""
        highest, places = self._constants
        return highest.on(device), places.on(device)


class BatchReader:
    """A reader that takes the collection's features out of a batch and checks them.

    Args:
        collection: tables and features that are looked up.
        columns: dtype of each column that ids must carry, by name; weights are made floats.
        checks: the level of checks.
        any_id: indices of the tables that any id may be looked up in.
        weights_refusal: the reason why weights of ids cannot be trained; empty if they can.
    """

    def __init__(
        self,
        collection: Collection,
        *,
        columns: Mapping[str, torch.dtype],
        checks: InputChecks = InputChecks.STANDARD,
        any_id: AbstractSet[int] = frozenset(),
        weights_refusal: str = "",
    ) -> None:
        self.collection, self.checks, self._columns = collection, checks, columns
        self._any_id, self._weights_refusal = any_id, weights_refusal
        self._warned: set[int] = set()
        self._known_keys: _Keys | None = None

    def read(self, features: KeyedJaggedTensor | None) -> FeatureBatch:
        """Check a batch and return its features in the collection's order.

        Raises:
            BatchProblem: a feature or weights are missing or unexpected, an id is out of range, ...
        """
        if not isinstance(features, KeyedJaggedTensor):
            raise BatchProblem(
                f"a sharded collection takes a KeyedJaggedTensor, got {type(features).__name__}"
            )
        if problem := features.late_problem():
            self._refuse(problem)
        keys = self._keys(features)
        self._check_form(features)
        values = _in_a_row(features.values(), torch.int64)
        counts, num_used, are_fine = self._counted(features, values, keys)
        if problem := features.lookup_problem((), num_used=num_used):
            self._refuse(problem)
        if not are_fine:
            values = self._in_range(values, counts, features)
        columns, trained = dict[str, Tensor](), None
        for name in self._columns:
            columns[name] = self._column(name, features, counts)
        if WEIGHTS in columns and _is_trained(features.weights()):
            trained = features.weights().to(torch.float32)
        lengths, sizes = _lengths_of(features, keys)
        inverse = None
        if features.variable_stride_per_key() and self.collection.is_pooled:
            inverse = self._inverse(features)
        if not keys.in_order:
            starts, counts = starts_of(counts)[keys.places], counts[keys.places]
            values = take(values, starts, counts)
            columns = columns and {name: take(own, starts, counts) for name, own in columns.items()}
            if trained is not None:
                trained = trained.index_select(0, index_of(starts, counts, trained.device))
        return FeatureBatch(lengths, values, columns, counts, sizes, inverse, trained)

    def _counted(self, features: KeyedJaggedTensor, values: Tensor, keys: _Keys) -> tuple[Ints, int, bool]:
        """Number of ids of each key, and of all; and True if the ids are in range or not to be checked.

        The host waits for a device once, for both.
        """
        is_checked = self.checks is not InputChecks.OFF
        if is_host(values.device):
            counts = np.array(features.length_per_key(), dtype=np.int64)
            num_used = int(total(counts))
            is_checked &= num_used == values.numel()  # else the caller complains of that
            return (
                counts,
                num_used,
                not is_checked or are_in_range(values, counts, keys.highest, keys.last),
            )
        most = keys.on(values.device)[0]
        are_fine = features.read_counts(
            lambda own: ~out_of_range(values, own, most).any() if is_checked else torch.ones_like(most[:1]),
            read_on_host,
        )
        counts = np.array(features.length_per_key(), dtype=np.int64)
        return counts, int(total(counts)), are_fine

    def _inverse(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Place of each example among those of each feature, ``[F, examples]``; ``None`` if all have as many.

        Raises:
            BatchProblem: the batch does not say it of a feature.
        """
        given = features.inverse_indices_or_none()
        if given is None:
            self._check_same_sizes(features)
            return None
        keys, places = given
        row = {key: index for index, key in enumerate(keys)}
        for index, name in enumerate(self.collection.features):
            if name not in row:
                raise BatchProblem(
                    f"{self._where(index)} has no row in the KeyedJaggedTensor's inverse_indices, whose keys are "
                    f"{some(keys)}"
                )
        if self.checks is not InputChecks.OFF and not is_host(
            places.device
        ):  # on the host `late_problem` has checked it
            features.validate()
        rows = np.array([row[name] for name in self.collection.features], dtype=np.int64)
        return places.index_select(0, sent_to(places.device, rows)).long()

    def _check_same_sizes(self, features: KeyedJaggedTensor) -> None:
        sizes = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        first = self.collection.features[0]
        for index, name in enumerate(self.collection.features):
            if sizes[name] != sizes[first]:
                raise BatchProblem(
                    f"{self._where(index)} has {sizes[name]} examples and feature {first!r} has {sizes[first]}, and "
                    "the KeyedJaggedTensor does not say which belong together: give inverse_indices=(keys, places "
                    "[keys, examples])"
                )

    def _keys(self, features: KeyedJaggedTensor) -> _Keys:
        keys = features.keys()
        known = self._known_keys
        if known is None or known.keys != keys:
            if problem := features.lookup_problem(self.collection.features):
                self._refuse(problem)
            self._known_keys = known = self._read_keys(keys)
        return known

    def _refuse(self, problem: str) -> NoReturn:
        """Raise the reason why a batch cannot be looked up."""
        raise BatchProblem(f"{self._where(0)}: {problem}")

    def _read_keys(self, keys: Sequence[str]) -> _Keys:
        place = {key: index for index, key in enumerate(keys)}
        wanted = self.collection.features
        for index, name in enumerate(wanted):
            if name not in place:
                raise BatchProblem(
                    f"{self._where(index)} is missing from the KeyedJaggedTensor, whose keys are {some(keys)}."
                    f"{nearest(name, keys)}"
                )
        places = [place[name] for name in wanted]
        highest = torch.full((len(keys),), ANY, device="cpu")
        for feature, feature_place in enumerate(places):
            smallest = self.collection.smallest_table(feature, but=self._any_id)
            highest[feature_place] = smallest.num_embeddings - 1 if smallest else ANY
        return _Keys(list(keys), places, places == list(range(len(keys))), highest)

    def _where(self, feature: int) -> str:
        table = self.collection.smallest_table(feature, but=self._any_id)
        table = table or self.collection.smallest_table(feature)
        assert table is not None  # features are those of tables
        return f"feature {self.collection.features[feature]!r} of table {table.describe()}"

    def _check_form(self, features: KeyedJaggedTensor) -> None:
        """Check that there are ids and all columns that are asked for, and, if strict, no unused input."""
        if features.values().is_meta:
            self._refuse("the KeyedJaggedTensor is on 'meta', where there are no ids")
        if self._columns:
            self._check_columns(features.columns())
        if self.checks is InputChecks.STRICT and features.stride():
            self._check_all_is_used(features)

    def _check_columns(self, columns: Mapping[str, Tensor]) -> None:
        for name, dtype in self._columns.items():
            if name not in columns:
                why = (
                    "the collection is weighted"
                    if name == WEIGHTS
                    else f"a compute kernel asks for the column {name!r}"
                )
                self._refuse(f"{why} but the KeyedJaggedTensor has no {name}")
            if name != WEIGHTS and columns[name].dtype != dtype and columns[name].numel():
                self._refuse(
                    f"a compute kernel asks for the column {name!r} of {dtype}, and the KeyedJaggedTensor has it of "
                    f"{columns[name].dtype}"
                )
        if self._weights_refusal and _is_trained(columns[WEIGHTS]):
            raise BatchProblem(self._weights_refusal)

    def _check_all_is_used(self, features: KeyedJaggedTensor) -> None:
        known, module = self.collection.features, self.collection.tables[0].module
        unknown = sorted(set(features.keys()) - set(known))
        if unknown:
            where = f"the collection at {module!r}" if module else "the collection"
            raise BatchProblem(
                f"feature {unknown[0]!r}: no table of {where} looks it up, which strict checks refuse: leave it out."
                f"{nearest(unknown[0], known)}"
            )
        for name in features.columns():
            if name not in self._columns:
                why = (
                    "the collection is not weighted"
                    if name == WEIGHTS
                    else "no compute kernel asks for that column"
                )
                self._refuse(
                    f"{why} but the KeyedJaggedTensor has {name}, which strict checks refuse: leave them out"
                )

    def _column(self, name: str, features: KeyedJaggedTensor, counts: Ints) -> Tensor:
        column = _in_a_row(features.columns()[name].detach(), self._columns[name])
        if self.checks is InputChecks.STRICT:
            for feature, _, wrong, own in self._features_with(~column.isfinite(), column, counts, features):
                position = int(wrong.nonzero()[0])
                raise BatchProblem(
                    f"{self._where(feature)} has the {name.removesuffix('s')} {own[position].item()} at position "
                    f"{position} of its values; {name} must be finite"
                )
        return column

    def _features_with(
        self, wrong: Tensor, values: Tensor, counts: Ints, features: KeyedJaggedTensor
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield each feature with wrong values: its index, its last row, a mask of its values, and these."""
        keys, sizes = self._keys(features), counts.tolist()
        pieces = list(zip(wrong.split(sizes), values.split(sizes), strict=True)) if wrong.any() else []
        for feature, place in enumerate(keys.places if pieces else ()):
            if pieces[place][0].any():
                yield feature, int(keys.highest[place]), *pieces[place]

    def _in_range(self, values: Tensor, counts: Ints, features: KeyedJaggedTensor) -> Tensor:
        """The ids, of which some are out of range, with those replaced where that is asked for.

        Raises:
            IdProblem: they are not to be replaced.
        """
        most = self._keys(features).on(values.device)[0]
        wrong = out_of_range(values, sent_to(values.device, counts), most)
        if self.checks is InputChecks.IGNORE:
            return values.masked_fill(wrong, 0)
        for feature, highest, mask, ids in self._features_with(wrong, values, counts, features):
            if self.checks is not InputChecks.WARNING:
                position = int(mask.nonzero()[0])
                raise IdProblem(
                    f"{self._where(feature)} has the id {int(ids[position])} at position {position} of its "
                    f"values; ids must be 0 <= id < {highest + 1}: hash or clamp them before the lookup"
                )
            if feature not in self._warned:
                self._warned.add(feature)
                warnings.warn(
                    f"{self._where(feature)}: {int(mask.sum())} of {mask.numel()} ids are not 0 <= id < {highest + 1} "
                    "and are looked up as id 0; further batches are not mentioned",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return values.masked_fill(wrong, 0)


def _lengths_of(features: KeyedJaggedTensor, keys: _Keys) -> tuple[Tensor, Ints | None]:
    """Lengths of the bags of the collection's features, ``[F, B]`` int32, and each one's batch size if they differ.

    Where they differ, each is filled up with empty bags to the greatest.
    """
    lengths = _in_a_row(features.lengths(), torch.int32)
    if not features.variable_stride_per_key():
        by_key = lengths.view(len(keys.keys), features.stride())
        return (by_key if keys.in_order else by_key.index_select(0, keys.on(by_key.device)[1])), None
    every = np.array(features.stride_per_key(), dtype=np.int64)
    sizes = every[keys.places]
    lengths, most = take(lengths, starts_of(every)[keys.places], sizes), int(sizes.max())
    filled = filled_up(lengths, sizes, np.full_like(sizes, most)).view(len(sizes), most)
    return filled, None if (sizes == most).all() else sizes


def _is_trained(weights: Tensor) -> bool:
    return weights.requires_grad and torch.is_grad_enabled()


def _in_a_row(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in a dtype and contiguous, so that they may be viewed as bytes."""
    if tensor.dtype is not dtype:  # to ask takes a twentieth of the time that a conversion to the same does
        tensor = tensor.to(dtype)
    # Of one element, or none, any stride is contiguous to torch, which then does not view the tensor in another dtype.
    return tensor.contiguous() if tensor.numel() > 1 else tensor.clone(memory_format=torch.contiguous_format)
