"""Loading of checkpoints: what is stored is compared with the model first, then read, each rank its own blocks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import Factory, define, field, frozen
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from shardwright.arguments import brief
from shardwright.errors import CheckpointError, InvalidInputError, ShardwrightError, nearest
from shardwright.optim.keyed import KeyedOptimizer
from shardwright.planning.layouts.stored_rows import rows_between
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.tables.blocked_tensor import BlockedTensor
from shardwright.runtime.sharded.tables.fused_optimizer import FusedOptimizer
from shardwright.runtime.sharded.tables.table_state import LocalBlock
from shardwright_plugins.checkpoint.entries import (
    EXTRA,
    GROUPS,
    MODEL,
    STATE,
    STEP,
    Held,
    NamedTable,
    Trained,
)
from shardwright_plugins.checkpoint.files import name_of
from shardwright_plugins.checkpoint.folder import disk_errors, find_checkpoint
from shardwright_plugins.checkpoint.reading import (
    NOWHERE,
    Found,
    Ints,
    PieceRequest,
    StoredCheckpoint,
    box_requests,
    index_of,
    row_requests,
)
from shardwright_plugins.checkpoint.saving import NAME_ALIKE, env_of
from shardwright_plugins.checkpoint.stored_order import STORED, STORED_ROWS

_MOST_NAMED = 5  # names in an error; the others are counted
ALL, _WEIGHTS = PARTS = ("all", "weights")
"""Parts of a checkpoint that can be loaded, the default first."""


@frozen
class LoadedCheckpoint:
    """The result of loading, beside the state that is in the model and its optimizers now.

    Args:
        path: folder of the checkpoint, or the checkpoint_id of a storage reader.
        step: number of the training step; ``None`` of one that DCP alone wrote.
        left_out: names that the checkpoint has and that were not loaded: with ``parts="weights"`` all that is an
            optimizer's; if not strict also what the model has not, and what is another optimizer's.
        extra: plain data of this rank, if as many ranks saved it as there are now; else rank 0's.
        extras: plain data of every rank that saved it, in order.
        plan: plan document of the model that was saved.
        missing_keys: names that the model has and the checkpoint has not; only if not strict.
        unexpected_keys: names that the checkpoint has and the model has not; only if not strict.

    Example:
        >>> import tempfile, shardwright as sw
        >>> bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])])
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = sw.save_checkpoint(folder, model, step=1, extra={"epoch": 3})
        ...     loaded = sw.load_checkpoint(folder, model)
        >>> loaded.step, loaded.extra
        (1, {'epoch': 3})
    """

    path: Path | str
    step: int | None = None
    extra: Mapping[str, Any] = field(factory=dict)
    extras: Sequence[Mapping[str, Any]] = ()
    plan: Mapping[str, Any] | None = field(default=None, repr=False)
    missing_keys: Sequence[str] = ()
    unexpected_keys: Sequence[str] = ()
    left_out: Sequence[str] = ()


def load_checkpoint(
    path: str | os.PathLike[str] | StorageReader,
    model: nn.Module,
    *optimizers: Optimizer,
    step: int | None = None,
    parts: str = ALL,
    renames: Mapping[str, str] | None = None,
    strict: bool = True,
    verify: bool = True,
    dcp_only: bool = False,
) -> LoadedCheckpoint:
    """Load a model and its optimizers, each rank its own blocks, whatever plan and ranks saved them.

    Every rank makes this call. The checkpoint is compared with the model, and its files with their checksums, before
    anything is changed.

    Args:
        path: a checkpoint, or a folder of them, of which the newest is taken. Or a storage reader of
            ``torch.distributed.checkpoint`` with one.
        model: sharded or not; its fused optimizer is loaded with it.
        optimizers: those of the dense rest, keyed or not.
        step: step of the checkpoint to take from a folder of them; the newest by default.
        parts: ``"all"``, or ``"weights"`` without the state of optimizers, which stays as it is here.
        renames: names in the checkpoint and what they are called in the model: of a table, a module or a parameter,
            one or several words between dots.
        strict: every name must be in both, with one dtype; else what is in both is loaded, and converted. State of
            another optimizer than the one here is then left out, parameter by parameter.
        verify: compare all files with their checksums; each rank reads its share of them for that.
        dcp_only: take a folder that ``torch.distributed.checkpoint`` alone wrote, without step and checksums.

    Returns:
        Step, the user's data and the plan; see :class:`LoadedCheckpoint`.

    Raises:
        CheckpointError: there is none, it is damaged, or it does not fit the model.
        InvalidInputError: there are no such parts.
        DistributedError: ranks gave different paths or steps; or a rank did not make this call, or was lost in it.

    All ranks raise, and an error of the same class.

    Example:
        >>> import shardwright as sw
        >>> sw.load_checkpoint("/nowhere", torch.nn.Linear(2, 1))
        Traceback (most recent call last):
        ...
        shardwright.errors.CheckpointError: there is no checkpoint in /nowhere
    """
    env = env_of(model)
    with env.together("load_checkpoint()"), disk_errors(), torch.no_grad():
        _check_parts(parts)
        if isinstance(path, StorageReader) and step is not None:
            raise InvalidInputError(
                f"step={step}: a storage reader has one checkpoint", subject="step", asked=step
            )
        place = name_of(path) if isinstance(path, StorageReader) else str(path)
        env.agree("the arguments of load_checkpoint()", {"path": repr(place), "step": step}, NAME_ALIKE)
        source = path if isinstance(path, StorageReader) else _found(place, step, env)
        stored = StoredCheckpoint(source, dcp_only=dcp_only)
        loading = _Loading(Trained(model, optimizers), stored, dict(renames or {}), parts == ALL)
        missing, unexpected = loading.compare(strict=strict)
        if verify:
            loading.stored.verify(loading.stored.files[env.rank :: env.world_size])
        extras = loading.extras()
        env.agree("comparing the checkpoint with the model")  # before anything is changed
        loading.load()
    manifest = loading.stored.manifest
    own = extras[env.rank] if len(extras) == env.world_size else (extras or [{}])[0]
    step, plan = (None, None) if manifest is None else (manifest.step, manifest.plan)
    return LoadedCheckpoint(stored.path, step, own, extras, plan, missing, unexpected, loading.left_out())


def _found(place: str, step: int | None, env: ShardingEnv) -> Path:
    """The folder of the checkpoint that is meant, as rank 0 finds it."""
    found = str(find_checkpoint(Path(place), step)) if env.rank == 0 else ""
    env.agree("finding the checkpoint")
    return Path(env.communicator.broadcast_object(found))


def _check_parts(parts: str) -> None:
    if parts not in PARTS:
        raise InvalidInputError(
            f"parts must be {' or '.join(map(repr, PARTS))}, got {brief(parts)}",
            subject="parts",
            asked=parts,
            possible=PARTS,
        )


@define(eq=False)
class _Loading:
    """A checkpoint and what it is loaded into.

    Args:
        trained: model and optimizers.
        stored: the checkpoint.
        renames: names in it, and what they are called in the model.
        with_state: load the state of optimizers, too.
    """

    trained: Trained
    stored: StoredCheckpoint
    renames: Mapping[str, str]
    with_state: bool = True
    _keys: dict[str, str] = Factory(dict)
    _wanted: dict[str, Any] = Factory(dict)
    _states: dict[Tensor, dict[str, Any]] = Factory(dict)
    _rows: dict[LocalBlock, Ints] = Factory(dict)
    _plain: dict[str, Any] = Factory(dict)
    _groups: list[dict[str, Any]] | None = None
    _others: set[str] = Factory(set)
    _unfit_groups: set[int] = Factory(set)

    def __attrs_post_init__(self) -> None:
        entries = self.stored.entries
        prefix = "" if any(key.startswith(MODEL) for key in entries) else MODEL
        self._keys = {prefix + self._renamed(key): key for key in entries}
        if len(self._keys) != len(entries):
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
        return self.stored.entries[self._keys[key]] if key in self._keys else None

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
            self._others |= self._of_other_optimizers(wanted)
            wanted = {key: value for key, value in wanted.items() if _parameter_of(key) not in self._others}
            problems = []
        problems = [
            p for key in wanted for p in self._differences(key, wanted[key], strict=strict)
        ] + problems
        self._wanted = {key: value for key, value in wanted.items() if self._is_stored(key)}
        expected = wanted.keys() | self._row_states()
        missing = sorted(key for key in expected if not self._is_stored(key))
        unexpected = sorted(
            key for key in map(_whole_name, self._keys) if not self._is_expected(key, expected)
        )
        if strict:
            problems = [*self._unmatched(missing, unexpected, expected), *problems]
        if problems:
            raise CheckpointError(
                f"the checkpoint {self.stored.path} does not fit the model: {'; '.join(problems)}"
            )
        return missing, unexpected

    def _is_stored(self, key: str) -> bool:
        return key in self._keys or f"{key}.{STORED}" in self._keys

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
    def _leaves(self) -> list[tuple[str, KeyedOptimizer]]:
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
        for prefix, leaf in self._leaves:
            # An optimizer that has made no step has no states to compare: its hyperparameters tell it from others.
            if id(leaf) in self._unfit_groups and not (isinstance(leaf, FusedOptimizer) or leaf.state):
                found |= set(self.trained.names_of(prefix, leaf).values())
        return found

    def left_out(self) -> list[str]:
        """Names that are stored and were not loaded, as far as this rank knows."""
        loaded = self._wanted.keys() | self._row_states()
        groups = [
            self._groups_of(prefix, leaf) if id(leaf) not in self._unfit_groups else None
            for prefix, leaf in self._leaves
        ]
        if groups and None not in groups:
            loaded.add(GROUPS)
        return sorted(
            key
            for key in {*map(_whole_name, self._keys)} - loaded
            if not key.startswith(EXTRA) and not (self.with_state and self._is_elsewhere(key))
        )

    def _optimizers_wanted(self) -> Iterator[tuple[str, Any]]:
        for prefix, leaf in self._leaves:
            if isinstance(leaf, FusedOptimizer):
                yield from self.trained.states(prefix, leaf)
                continue
            for held in self.trained.held(prefix, leaf):
                states = {
                    local: self._states.setdefault(own, dict(leaf.state.get(own, {})))
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
        stored = [_whole_name(key)[len(start) :] for key in self._keys if key.startswith(start)]
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

    def load(self) -> None:
        """Read everything into its place."""
        for named in self.trained.tables:
            self._place_rows(named)
        self.stored.read(
            request for key, value in self._wanted.items() for request in self._requests(key, value)
        )
        self._load_plain()
        for prefix, leaf in self._leaves:
            self._load_optimizer(prefix, leaf)

    def _place_rows(self, named: NamedTable) -> None:
        """Find out where the rows of each block are stored, where the table's layout alone does not say it."""
        index = f"{MODEL}{named.name}.{STORED_ROWS}"
        if named.is_keyed:
            self._place_keys(named)
        elif index in self._keys:
            row_map = named.table.state.sharding.layout.row_map
            for local in named.table.state.local:
                part = local.block.rows.index
                found = self._look(index, lambda rows, part=part: row_map.part_of(rows) == part)
                self._rows[local] = _by_local_row(found, row_map.local_row_of, local.block.num_rows)

    def _look(self, index: str, is_mine: Any) -> Found:
        key = self._keys[index]
        entry = self.stored.entries[key]
        assert isinstance(entry, TensorStorageMetadata)  # compared before
        found = Found(is_mine)
        self.stored.read(found.requests(key, entry))
        return found

    def _place_keys(self, named: NamedTable) -> None:
        """Have each block take over its keys, wherever they were."""
        row_map, names = named.table.state.sharding.layout.row_map, named.table.row_state
        keys = [f"{MODEL}{named.prefix}{name}" for name in names]
        if not all(key in self._keys for key in keys):
            return
        named.table.forget_loaded_rows()
        for local in named.table.state.local:
            part = local.block.rows.index
            found = self._look(keys[0], lambda ids, part=part: row_map.part_of(ids) == part)
            places = found.places
            values = {name: torch.zeros(len(places), 1, dtype=torch.int64) for name in names}
            for key, name in zip(keys, names, strict=True):
                entry = self.stored.entries[self._keys[key]]
                assert isinstance(entry, TensorStorageMetadata)
                self.stored.read(row_requests(self._keys[key], entry, values[name], places, 0))
            source = named.table.index_of(local).load(values).numpy()
            self._rows[local] = np.where(source < 0, NOWHERE, np.append(places, NOWHERE)[source])

    def _requests(self, wanted: str, value: Any) -> Iterator[PieceRequest]:
        by_index = f"{wanted}.{STORED}" in self._keys
        key = self._keys[f"{wanted}.{STORED}" if by_index else wanted]
        entry = self.stored.entries[key]
        if not isinstance(entry, TensorStorageMetadata):
            return
        if isinstance(value, BlockedTensor) and not value.dim():
            for _, values in value.blocks:
                yield from box_requests(key, entry, values, ())
        elif isinstance(value, BlockedTensor):
            for local, values in value.blocks:
                first_column = local.block.columns.start if value.shape[1] > 1 else 0
                yield from self._block_requests(key, entry, local, values, first_column)
        elif by_index:
            places = self.stored.places_of_rows(self._keys[index_of(wanted)])
            yield from row_requests(key, entry, value.detach(), places, 0)
        else:
            yield from box_requests(key, entry, value.detach(), (0,) * value.dim())

    def _block_requests(
        self, key: str, entry: TensorStorageMetadata, local: LocalBlock, values: Tensor, first_column: int
    ) -> Iterator[PieceRequest]:
        rows, placed = local.block.rows, self._rows.get(local)
        if placed is None and rows.bounds is not None:
            yield from box_requests(key, entry, values, (rows.bounds[0], first_column))
            return
        if placed is None:
            placed = rows_between(rows.rows, 0, local.block.num_rows, entry.size[0])
        yield from row_requests(key, entry, values, placed, first_column)

    def _load_plain(self) -> None:
        """Read entries that are no tensors; take over those of the model."""
        self._plain = {
            key: self.stored.plain(own)
            for key, own in self._keys.items()
            if key.startswith((MODEL, STATE)) and isinstance(self.stored.entries[own], BytesStorageMetadata)
        }
        plain = {key.removeprefix(MODEL): own for key, own in self._plain.items() if key.startswith(MODEL)}
        if plain:
            self.trained.root.load_state_dict(plain, strict=False)

    def _load_optimizer(self, prefix: str, leaf: KeyedOptimizer) -> None:
        """Have an optimizer go on with what was read."""
        if isinstance(leaf, FusedOptimizer):
            keys = {name: f"{STATE}{prefix}{name}.{STEP}" for name in leaf.tables}
            read = {name: self._wanted[key].blocks for name, key in keys.items() if key in self._wanted}
            for name, own in read.items():
                table = leaf.tables[name]
                for (_, step), local in product(own, table.state.local):
                    table.lookup_of(local).load_step(float(step))
        for held in self.trained.held(prefix, leaf):
            start = f"{STATE}{held.name}."
            for own in () if held.name in self._others else held.blocks.values():
                read = {
                    entry: self._plain.get(start + entry, value) for entry, value in self._states[own].items()
                }
                state = {entry: value for entry, value in read.items() if value is not None}
                if state:
                    leaf.state[own] = state
        groups = self._groups_of(prefix, leaf)
        if groups is not None and id(leaf) not in self._unfit_groups:
            leaf.take_groups(groups)

    def _groups_of(self, prefix: str, leaf: KeyedOptimizer) -> list[dict[str, Any]] | None:
        """The stored groups of an optimizer's parameters, by its own names; ``None`` where some are in none."""
        if GROUPS not in self._keys:
            return None
        if self._groups is None:
            self._groups = self.stored.plain(self._keys[GROUPS])
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
        for prefix, leaf in self._leaves:
            groups = self._groups_of(prefix, leaf)
            try:
                if groups is not None:
                    leaf.check_groups(groups)
            except ShardwrightError as error:
                self._unfit_groups.add(id(leaf))
                yield str(error)
            if groups is None and strict and leaf.params:
                yield "it has no hyperparameters (param_groups) of all parameters; to go on without, give strict=False"

    def extras(self) -> list[Mapping[str, Any]]:
        """Plain data that users saved, by rank."""
        ranks = sorted(int(key.removeprefix(EXTRA)) for key in self.stored.entries if key.startswith(EXTRA))
        return [self.stored.plain(f"{EXTRA}{rank}") for rank in ranks]


def _by_local_row(found: Found, local_row_of: Any, num_rows: int) -> Ints:
    """The stored row of each local row.

    Raises:
        CheckpointError: the index lacks one.
    """
    placed = np.full(num_rows, NOWHERE, dtype=np.int64)
    local = np.asarray(local_row_of(found.numbers))
    if len(local) != num_rows or (num_rows and not 0 <= local.min() <= local.max() < num_rows):
        raise CheckpointError(f"the stored index of rows has {len(local)} rows for a block of {num_rows}")
    placed[local] = found.places
    if (placed == NOWHERE).any():
        raise CheckpointError(f"the stored index of rows names a row twice, of a block of {num_rows}")
    return placed


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
