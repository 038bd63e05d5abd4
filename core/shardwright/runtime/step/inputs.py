"""Checking a batch before it is routed, so that bad input on one rank is an error on all, in the same step.

What is wrong is an exception on the rank whose batch it is, and a status word for the others (see
:mod:`shardwright.runtime.ranks.lockstep`).

Legend: F features, N ids.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.errors import InvalidInputError, nearest
from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.ranks.devices import is_host
from shardwright.runtime.step.collection import Collection, FeatureBatch
from shardwright.runtime.step.segments import starts_of, take
from shardwright.settings import CHECKS_VARIABLE
from shardwright.sparse import KeyedJaggedTensor

_ANY = -1


class InputChecks(IntEnum):
    """How closely batches are looked at.

    ``off``: what is needed to route them, that is, every feature is there and ids have weights where the collection
    is weighted. An id out of range then is undefined behaviour, as in FBGEMM.

    ``standard``: also the range of every id. And what is not looked at, features of no table and weights where none
    belong, is fine if every rank's batch has it, since models share one batch between collections; not if only some
    ranks' batches do.

    ``strict``: what is not looked at is refused, and weights must be finite.
    """

    OFF = 0
    STANDARD = 1
    STRICT = 2

    @classmethod
    def of(cls, name: str | None, environment: Mapping[str, str] = os.environ) -> InputChecks:
        """The checks of that name; by default those that ``SHARDWRIGHT_INPUT_CHECKS`` names, else the standard.

        Raises:
            InvalidInputError: no such checks.
        """
        told = name if name is not None else environment.get(CHECKS_VARIABLE) or cls.STANDARD.name
        if told.upper() not in cls.__members__:
            known = [member.lower() for member in cls.__members__]
            where = "input_checks" if name is not None else CHECKS_VARIABLE
            raise InvalidInputError(
                f"{where} is {told!r}; it must be one of {', '.join(known)}.{nearest(told, known)}"
            )
        return cls[told.upper()]


class Status(IntEnum):
    """What a rank says of its batch in the header's status word."""

    FINE = 0
    BAD_INPUT = 1
    FAILED = 2
    NO_BATCH = 3  # its data has ended, and it takes no further part
    EMPTY_BATCH = 4  # its data has ended, and it goes on with empty batches
    STOPPED = 5  # the step before this batch's failed there

    @property
    def is_problem(self) -> bool:
        """Whether something is wrong, of which all ranks are to be told."""
        return self in (Status.BAD_INPUT, Status.FAILED)


def goes_on(statuses: Sequence[Status]) -> bool:
    """Whether the batches of which the ranks say this are trained on, if nobody complains."""
    said = set(statuses)
    return not said & {Status.NO_BATCH, Status.STOPPED} and bool(said - {Status.EMPTY_BATCH})


class BatchProblem(InvalidInputError):
    """What is wrong with a rank's batch; every rank raises it, with the rank before the text."""


@frozen(eq=False)
class _Keys:
    """What follows from the keys of a batch, which are the same in every step.

    Args:
        keys: the keys.
        places: where each feature of the collection stands among them.
        in_order: they are the collection's features, in its order.
        highest: for each, the last row of the smallest table it is looked up in; -1 where there is none.
        extra: a text for each that no table looks up, sorted.
        extra_word: a positive number for them.
    """

    keys: Sequence[str]
    places: Sequence[int]
    in_order: bool
    highest: Tensor
    extra: tuple[str, ...]
    extra_word: int


class BatchReader:
    """Takes the collection's features out of a batch and checks them.

    Args:
        collection: what is looked up.
        is_weighted: ids must carry weights.
        checks: how closely to look.
        any_id: the tables, by index, that any id may be looked up in.
    """

    def __init__(
        self,
        collection: Collection,
        *,
        is_weighted: bool,
        checks: InputChecks = InputChecks.STANDARD,
        any_id: AbstractSet[int] = frozenset(),
    ) -> None:
        self.collection, self.checks, self._is_weighted = collection, checks, is_weighted
        self._any_id = any_id
        self._known_keys: _Keys | None = None

    def extras(self, features: KeyedJaggedTensor) -> tuple[tuple[str, ...] | None, int]:
        """What a batch brings that is not looked at, as texts for errors, and a number for it.

        ``(None, 0)`` where it is not to be compared with other ranks': where checks are off, and of a batch without
        examples, since a rank that has run out of data may make one of any keys.
        """
        if self.checks is InputChecks.OFF or features.stride() == 0:
            return None, 0
        keys = self._keys(features)
        if self._is_weighted or features.weights_or_none() is None:
            return keys.extra, keys.extra_word
        return (*keys.extra, self._unused_weights()), ~keys.extra_word

    def _unused_weights(self) -> str:
        return f"{self._where(0)}: the collection is not weighted but the KeyedJaggedTensor has weights"

    def _unexpected(self, key: str) -> str:
        module, known = self.collection.tables[0].module, self.collection.features
        where = f"the collection at {module!r}" if module else "the collection"
        meant = nearest(key, known).strip()
        return f"feature {key!r} is unexpected: no table of {where} looks it up{meant and f' ({meant})'}"

    def read(self, features: KeyedJaggedTensor | None) -> FeatureBatch:
        """The features in the collection's order.

        Raises:
            BatchProblem: a feature or weights are missing or unexpected, an id is out of range, ...
        """
        if not isinstance(features, KeyedJaggedTensor):
            raise BatchProblem(
                f"a sharded collection takes a KeyedJaggedTensor, got {type(features).__name__}"
            )
        keys = self._keys(features)
        self._check_form(features, keys)
        values = _in_a_row(features.values().to(torch.int64))
        counts = np.array(features.length_per_key(), dtype=np.int64)
        if self.checks is not InputChecks.OFF:
            self._check_ids(values, counts, keys)
        weights = self._weights(features, counts) if self._is_weighted else None
        lengths = features.lengths().to(torch.int32).view(len(counts), features.stride())
        if keys.in_order:
            return FeatureBatch(lengths, values, weights, counts)
        starts, own = starts_of(counts)[keys.places], counts[keys.places]
        return FeatureBatch(
            lengths[keys.places],
            take(values, starts, own),
            None if weights is None else take(weights, starts, own),
            own,
        )

    def _keys(self, features: KeyedJaggedTensor) -> _Keys:
        keys = features.keys()
        known = self._known_keys
        if known is None or known.keys != keys:
            self._known_keys = known = self._read_keys(keys)
        return known

    def _read_keys(self, keys: Sequence[str]) -> _Keys:
        place = {key: index for index, key in enumerate(keys)}
        wanted = self.collection.features
        for index, name in enumerate(wanted):
            if name not in place:
                raise BatchProblem(
                    f"{self._where(index)} is missing from the KeyedJaggedTensor, whose keys are {_some(keys)}."
                    f"{nearest(name, keys)}"
                )
        places = [place[name] for name in wanted]
        highest = torch.full((len(keys),), _ANY, device="cpu")
        for feature, feature_place in enumerate(places):
            smallest = self.collection.smallest_table(feature, but=self._any_id)
            highest[feature_place] = smallest.num_embeddings - 1 if smallest else _ANY
        extra = sorted(set(keys) - set(wanted))
        word = 1 + zlib.crc32("\0".join(extra).encode())
        return _Keys(
            list(keys),
            places,
            places == list(range(len(keys))),
            highest,
            tuple(map(self._unexpected, extra)),
            word,
        )

    def _where(self, feature: int) -> str:
        table = self.collection.smallest_table(feature, but=self._any_id)
        table = table or self.collection.smallest_table(feature)
        assert table is not None  # features are those of tables
        return f"feature {self.collection.features[feature]!r} of table {table.describe()}"

    def _check_form(self, features: KeyedJaggedTensor, keys: _Keys) -> None:
        """Whether weights are there where they belong, and no more than is looked at."""
        weights = features.weights_or_none()
        if self._is_weighted:
            if weights is None:
                raise BatchProblem(
                    f"{self._where(0)}: the collection is weighted but the KeyedJaggedTensor has no weights"
                )
            if weights.requires_grad and torch.is_grad_enabled():
                raise BatchProblem(
                    f"{self._where(0)}: the weights of ids require gradients, which do not travel back to them: "
                    "detach() them"
                )
        if self.checks is InputChecks.STRICT and (extras := self.extras(features)[0]):
            raise BatchProblem(f"{extras[0]}. Strict checks refuse what is not looked at: leave it out")

    def _weights(self, features: KeyedJaggedTensor, counts: Ints) -> Tensor:
        weights = _in_a_row(features.weights().detach().to(torch.float32))
        if self.checks is InputChecks.STRICT and not bool(weights.isfinite().all()):
            self._check_weights(weights.split(counts.tolist()), self._keys(features))
        return weights

    def _check_weights(self, weights: Sequence[Tensor], keys: _Keys) -> None:
        for feature, place in enumerate(keys.places):
            wrong = weights[place].isfinite().logical_not().nonzero()
            if wrong.numel():
                position = int(wrong[0, 0])
                raise BatchProblem(
                    f"{self._where(feature)} has the weight {weights[place][position].item()} at position {position} "
                    "of its values; weights must be finite"
                )

    def _check_ids(self, values: Tensor, counts: Ints, keys: _Keys) -> None:
        if are_in_range(values, counts, keys.highest):
            return
        ids = values.split(counts.tolist())
        for feature, place in enumerate(keys.places):
            num_rows = int(keys.highest[place]) + 1
            if num_rows == _ANY + 1:
                continue
            wrong = ((ids[place] < 0) | (ids[place] >= num_rows)).nonzero()
            if wrong.numel():
                position = int(wrong[0, 0])
                raise BatchProblem(
                    f"{self._where(feature)} has the id {int(ids[place][position])} at position {position} of its "
                    f"values; ids must be 0 <= id < {num_rows}: hash or clamp them before the lookup"
                )


def are_in_range(values: Tensor, counts: Ints, highest: Tensor) -> bool:
    """Whether each feature's ids are all ``0 <= id <= highest``; one pass over the ids.

    Args:
        values: ``[N]`` int64, feature after feature.
        counts: ids of each feature, ``[F]``.
        highest: ``[F]`` int64 on the CPU; -1 where ids are not looked at.
    """
    if is_host(values.device):
        return _are_in_range_on_cpu(values, counts, highest)
    device = values.device
    most = highest.to(device).repeat_interleave(
        torch.from_numpy(counts).to(device), output_size=values.numel()
    )
    wrong = ((values < 0) | (values > most)) & (most != _ANY)
    return not bool(wrong.any())


def _are_in_range_on_cpu(values: Tensor, counts: Ints, highest: Tensor) -> bool:
    """Each feature's greatest id in one call of numpy; read as unsigned, negative ids, and -1, are the greatest."""
    used = counts.nonzero()[0]  # reduceat would take the next feature's first id for the maximum of none
    if not used.size:
        return True
    starts = starts_of(counts)[used]
    greatest = np.maximum.reduceat(values.numpy().view(np.uint64), starts)
    return bool((greatest <= highest.numpy().view(np.uint64)[used]).all())


def _some(names: Sequence[str]) -> str:
    """Names for an error: at most ten."""
    listed = ", ".join(repr(name) for name in names[:10])
    return f"{listed} and {len(names) - 10} more" if len(names) > 10 else listed or "none"


def _in_a_row(tensor: Tensor) -> Tensor:
    """The values one after the other, as they must be to be viewed as bytes."""
    # An empty tensor may have a stride of 0 (numpy makes such), which torch calls contiguous but does not view.
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)
