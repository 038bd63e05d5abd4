"""A checkpoint compared with a model and its optimizers: names, shapes, dtypes and hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from shardwright.errors import CheckpointError, InvalidInputError, ShardwrightError, nearest
from shardwright.optim.keyed import KeyedOptimizer
from shardwright.runtime.sharded.tables.blocked_tensor import BlockedTensor
from shardwright.runtime.sharded.tables.fused_optimizer import FusedOptimizer
from shardwright_plugins.checkpoint.entries import (
    EXTRA,
    GROUPS,
    MODEL,
    STATE,
    Held,
    Trained,
)
from shardwright_plugins.checkpoint.reading import StoredCheckpoint
from shardwright_plugins.checkpoint.stored_order import STORED, STORED_ROWS

_MOST_NAMED = 5  # names in an error; the others are counted


@define(eq=False)
class Comparison:
    """A checkpoint and what it is loaded into.

    Args:
        trained: model and optimizers.
        stored: the checkpoint.
        renames: names in it, and what they are called in the model.
        with_state: the state of optimizers is loaded, too.

    Attributes:
        keys: name of each stored entry, by what it is called in the model.
        wanted: the values that are loaded, by name.
        states: states of each parameter or block of an optimizer that is not fused.
        others: names of the parameters whose stored state is another optimizer's.
        unfit_groups: ids of the optimizers whose stored hyperparameters do not fit.
    """

    trained: Trained
    stored: StoredCheckpoint
    renames: Mapping[str, str]
    with_state: bool = True
    keys: dict[str, str] = field(factory=dict, init=False)
    wanted: dict[str, Any] = field(factory=dict, init=False)
    states: dict[Tensor, dict[str, Any]] = field(factory=dict, init=False)
    others: set[str] = field(factory=set, init=False)
    unfit_groups: set[int] = field(factory=set, init=False)
    _groups: list[dict[str, Any]] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        entries = self.stored.entries
        prefix = "" if any(key.startswith(MODEL) for key in entries) else MODEL
        self.keys = {prefix + self._renamed(key): key for key in entries}
        if len(self.keys) != len(entries):
            raise CheckpointError(f"the renames {dict(self.renames)} give two entries one name")
        known = {word for key in entries for word in key.split(".")}
        for old in self.renames:
            if not any(f".{old}." in f".{key}." for key in entries):
                raise InvalidInputError(
                    f"renames: {self.stored.path} has nothing called {old!r}.{nearest(old, known)}"
                )

    def _renamed(self, key: str) -> str:
        words = f".{key}."
        for old, new in self.renames.items():
            if f".{old}." in words:
                words = words.replace(f".{old}.", f".{new}.", 1)
                break
        return words[1:-1]

    def entry(self, key: str) -> TensorStorageMetadata | BytesStorageMetadata | None:
        """The entry stored under the model's name, if there is one."""
        return self.stored.entries[self.keys[key]] if key in self.keys else None

    def compare(self, *, strict: bool) -> tuple[list[str], list[str]]:
        """Compare names, shapes and dtypes.

        Returns:
            The names that are missing, and those that are not expected.

        Raises:
            CheckpointError: they do not fit.
        """
        wanted = {**dict(self._model_wanted()), **dict(self._optimizers_wanted())}
        problems = list(self._group_problems(strict=strict))
        if not strict:
            self.others |= self._of_other_optimizers(wanted)
            wanted = {key: value for key, value in wanted.items() if _parameter_of(key) not in self.others}
            problems = []
        problems = [
            p for key in wanted for p in self._differences(key, wanted[key], strict=strict)
        ] + problems
        self.wanted = {key: value for key, value in wanted.items() if self._is_stored(key)}
        expected = wanted.keys() | self._row_states()
        missing = sorted(key for key in expected if not self._is_stored(key))
        unexpected = sorted(
            key for key in map(_whole_name, self.keys) if not self._is_expected(key, expected)
        )
        if strict:
            problems = [*self._unmatched(missing, unexpected, expected), *problems]
        if problems:
            raise CheckpointError(
                f"the checkpoint {self.stored.path} does not fit the model: {'; '.join(problems)}"
            )
        return missing, unexpected

    def _is_stored(self, key: str) -> bool:
        return key in self.keys or f"{key}.{STORED}" in self.keys

    def _is_expected(self, key: str, expected: set[str]) -> bool:
        if key in expected or key == GROUPS or key.startswith(EXTRA) or not key.startswith((MODEL, STATE)):
            return True
        return key.startswith(STATE) and (not self.with_state or self._is_elsewhere(key))

    def _is_elsewhere(self, key: str) -> bool:
        """True for a state of a table without a block here, of which this rank does not know which states there are."""
        absent = (named.name for named in self.trained.tables if not named.table.state.local)
        return any(key.startswith(f"{STATE}{name}.") for name in absent)

    def _unmatched(self, missing: list[str], unexpected: list[str], expected: set[str]) -> Iterator[str]:
        more = "; to load what is in both, give strict=False, and the weights alone, parts='weights'"
        if missing:
            near = nearest(missing[0], unexpected).replace("Did you mean", "It has")
            hint = " renames={...} says what is called otherwise" if near else ""
            yield f"it lacks {_named(missing)}.{near}{hint}{more}"
        elif unexpected:
            whose = (
                "no optimizer that was given has a" if unexpected[0].startswith(STATE) else "the model has no"
            )
            yield f"{whose} place for {_named(unexpected)}{more}"

    def _row_states(self) -> set[str]:
        return {
            f"{MODEL}{named.prefix}{name}" for named in self.trained.tables for name in named.table.row_state
        }

    def _model_wanted(self) -> Iterator[tuple[str, Any]]:
        beside = self._row_states()  # which is read before
        for key, value in self.trained.model_state().items():
            if key not in beside:
                yield key, value

    @property
    def leaves(self) -> list[tuple[str, KeyedOptimizer]]:
        """The optimizers whose state is loaded, each with what stands before its parameters' names."""
        return self.trained.leaves if self.with_state else []

    def _of_other_optimizers(self, wanted: Mapping[str, Any]) -> set[str]:
        """Names of the parameters whose stored state is not that of their optimizer here."""
        has: dict[str, list[str]] = {}
        for key in wanted:
            if key.startswith(STATE):
                has.setdefault(_parameter_of(key), []).append(key)
        found = {
            name
            for name, own in has.items()
            if any(
                not self._is_stored(key) or any(self._differences(key, wanted[key], strict=False))
                for key in own
            )
            or len(own) < len(self._entries_of(name, ()))
        }
        for prefix, leaf in self.leaves:
            # An optimizer that has made no step has no states to compare: its hyperparameters tell it from others.
            if id(leaf) in self.unfit_groups and not (isinstance(leaf, FusedOptimizer) or leaf.state):
                found |= set(self.trained.names_of(prefix, leaf).values())
        return found

    def left_out(self) -> list[str]:
        """Names that are stored and were not loaded, as far as this rank knows."""
        loaded = self.wanted.keys() | self._row_states()
        groups = [
            self.groups_of(prefix, leaf) if id(leaf) not in self.unfit_groups else None
            for prefix, leaf in self.leaves
        ]
        if groups and None not in groups:
            loaded.add(GROUPS)
        return sorted(
            key
            for key in {*map(_whole_name, self.keys)} - loaded
            if not key.startswith(EXTRA) and not (self.with_state and self._is_elsewhere(key))
        )

    def _optimizers_wanted(self) -> Iterator[tuple[str, Any]]:
        for prefix, leaf in self.leaves:
            if isinstance(leaf, FusedOptimizer):
                yield from self.trained.states(prefix, leaf)
                continue
            for held in self.trained.held(prefix, leaf):
                states = {
                    local: self.states.setdefault(own, dict(leaf.state.get(own, {})))
                    for local, own in held.blocks.items()
                }
                for entry in self._entries_of(held.name, next(iter(states.values()))):
                    key = f"{STATE}{held.name}.{entry}"
                    for local, state in states.items():
                        state.setdefault(entry, self._made(key, held, held.blocks[local]))
                    yield key, held.state(states, entry)

    def _entries_of(self, name: str, own: Iterable[str]) -> list[str]:
        """The states of a parameter: those that it has, and those that are stored."""
        start = f"{STATE}{name}."
        stored = [_whole_name(key)[len(start) :] for key in self.keys if key.startswith(start)]
        return sorted({*own, *(entry for entry in stored if "." not in entry)})

    def _made(self, key: str, held: Held, own: Tensor) -> Any:
        """A place for a state that is stored and that the optimizer has not made yet, of a parameter or a block."""
        stored = self.entry(key) or self.entry(f"{key}.{STORED}")
        if not isinstance(stored, TensorStorageMetadata):
            return None
        size = tuple(stored.size)
        if held.table is not None and len(size) == 2:
            is_per_row = size[1] != held.table.state.table.embedding_dim
            size = len(own), size[1] if is_per_row else own.shape[1]
        # Counters stay on the host, as most optimizers have them.
        where = own.device if size else torch.device("cpu")
        return torch.zeros(size, dtype=stored.properties.dtype, device=where)

    def _differences(self, key: str, value: Any, *, strict: bool) -> Iterator[str]:
        stored = self.entry(key) or self.entry(f"{key}.{STORED}")
        if stored is None:
            return
        where = value.form.owner if isinstance(value, BlockedTensor) else ""
        is_tensor = isinstance(stored, TensorStorageMetadata)
        if is_tensor != isinstance(value, Tensor):
            yield f"{where}{key!r} is {'a' if is_tensor else 'no'} tensor in the checkpoint"
        elif not isinstance(stored, TensorStorageMetadata):
            return
        elif stored.size != value.shape and not _takes(value, stored.size):
            yield f"{where}{key!r} has the shape {list(stored.size)}, not {list(value.shape)}"
        elif strict and stored.properties.dtype != value.dtype:
            yield (
                f"{where}{key!r} is {stored.properties.dtype}, not {value.dtype}; to convert it, give strict=False"
            )

    def groups_of(self, prefix: str, leaf: KeyedOptimizer) -> list[dict[str, Any]] | None:
        """The stored groups of an optimizer's parameters, by its own names; ``None`` where some are in none."""
        if GROUPS not in self.keys:
            return None
        if self._groups is None:
            self._groups = self.stored.plain(self.keys[GROUPS])
        names = self.trained.names_of(prefix, leaf)
        groups = []
        for group in self._groups:
            stored = {self._renamed(name) for name in group["params"]}
            own = [name for name, whole in names.items() if whole in stored]
            if own:
                groups.append({**group, "params": own})
        found = {name for group in groups for name in group["params"]}
        return groups if found == set(names) else None

    def _group_problems(self, *, strict: bool) -> Iterator[str]:
        for prefix, leaf in self.leaves:
            groups = self.groups_of(prefix, leaf)
            try:
                if groups is not None:
                    leaf.check_groups(groups)
            except ShardwrightError as error:
                self.unfit_groups.add(id(leaf))
                yield str(error)
            if groups is None and strict and leaf.params:
                yield "it has no hyperparameters (param_groups) of all parameters; to go on without, give strict=False"

    def extras(self) -> list[Mapping[str, Any]]:
        """Plain data that users saved, by rank."""
        ranks = sorted(int(key.removeprefix(EXTRA)) for key in self.stored.entries if key.startswith(EXTRA))
        return [self.stored.plain(f"{EXTRA}{rank}") for rank in ranks]


def _parameter_of(key: str) -> str:
    """The parameter that an optimizer's state is of; empty for other entries."""
    return key.removeprefix(STATE).rpartition(".")[0] if key.startswith(STATE) else ""


def _whole_name(key: str) -> str:
    """The name of a whole tensor, whatever form its rows are stored in."""
    return key.removesuffix(f".{STORED}").removesuffix(f".{STORED_ROWS}")


def _takes(value: Tensor, shape: Sequence[int]) -> bool:
    """True if a table's values have room for stored ones of another number of rows."""
    table = value.form.memory if isinstance(value, BlockedTensor) else None
    return table is not None and bool(table.takes(shape, value.shape[1]))


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{len(names)} names, {shown}, ..."
