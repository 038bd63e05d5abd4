"""Loading of checkpoints: what is stored is compared with the model first, then read, each rank its own blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from shardwright.arguments import brief
from shardwright.errors import CheckpointError, InvalidInputError
from shardwright.optim.keyed import KeyedOptimizer
from shardwright.planning.layouts.stored_rows import rows_between
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.tables.blocked_tensor import BlockedTensor
from shardwright.runtime.sharded.tables.fused_optimizer import FusedOptimizer
from shardwright.runtime.sharded.tables.table_state import LocalBlock
from shardwright_plugins.checkpoint.comparing import Comparison
from shardwright_plugins.checkpoint.entries import (
    MODEL,
    STATE,
    STEP,
    NamedTable,
    Trained,
)
from shardwright_plugins.checkpoint.files import name_of
from shardwright_plugins.checkpoint.folder import disk_errors, find_checkpoint
from shardwright_plugins.checkpoint.reading import StoredCheckpoint
from shardwright_plugins.checkpoint.requests import (
    NOWHERE,
    Found,
    Ints,
    PieceRequest,
    box_requests,
    index_of,
    row_requests,
)
from shardwright_plugins.checkpoint.saving import NAME_ALIKE, env_of
from shardwright_plugins.checkpoint.stored_order import STORED, STORED_ROWS

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
        compared = Comparison(Trained(model, optimizers), stored, dict(renames or {}), parts == ALL)
        missing, unexpected = compared.compare(strict=strict)
        if verify:
            stored.verify(stored.files[env.rank :: env.world_size])
        extras = compared.extras()
        env.agree("comparing the checkpoint with the model")  # before anything is changed
        _Loading(compared).load()
    manifest = stored.manifest
    own = extras[env.rank] if len(extras) == env.world_size else (extras or [{}])[0]
    step, plan = (None, None) if manifest is None else (manifest.step, manifest.plan)
    return LoadedCheckpoint(stored.path, step, own, extras, plan, missing, unexpected, compared.left_out())


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
    """The reading of a checkpoint into what it was compared with."""

    compared: Comparison
    _rows: dict[LocalBlock, Ints] = field(factory=dict, init=False)
    _plain: dict[str, Any] = field(factory=dict, init=False)

    def load(self) -> None:
        """Read everything into its place."""
        for named in self.compared.trained.tables:
            self._place_rows(named)
        self.compared.stored.read(
            request for key, value in self.compared.wanted.items() for request in self._requests(key, value)
        )
        self._load_plain()
        for prefix, leaf in self.compared.leaves:
            self._load_optimizer(prefix, leaf)

    def _place_rows(self, named: NamedTable) -> None:
        """Find out where the rows of each block are stored, where the table's layout alone does not say it."""
        index = f"{MODEL}{named.name}.{STORED_ROWS}"
        if named.is_keyed:
            self._place_keys(named)
        elif index in self.compared.keys:
            row_map = named.table.state.sharding.layout.row_map
            for local in named.table.state.local:
                part = local.block.rows.index
                found = self._look(index, lambda rows, part=part: row_map.part_of(rows) == part)
                self._rows[local] = _by_local_row(found, row_map.local_row_of, local.block.num_rows)

    def _look(self, index: str, is_mine: Any) -> Found:
        key = self.compared.keys[index]
        entry = self.compared.stored.entries[key]
        assert isinstance(entry, TensorStorageMetadata)  # compared before
        found = Found(is_mine)
        self.compared.stored.read(found.requests(key, entry))
        return found

    def _place_keys(self, named: NamedTable) -> None:
        """Have each block take over its keys, wherever they were."""
        row_map, names = named.table.state.sharding.layout.row_map, named.table.row_state
        keys = [f"{MODEL}{named.prefix}{name}" for name in names]
        if not all(key in self.compared.keys for key in keys):
            return
        named.table.forget_loaded_rows()
        for local in named.table.state.local:
            part = local.block.rows.index
            found = self._look(keys[0], lambda ids, part=part: row_map.part_of(ids) == part)
            places = found.places
            values = {name: torch.zeros(len(places), 1, dtype=torch.int64) for name in names}
            for key, name in zip(keys, names, strict=True):
                entry = self.compared.stored.entries[self.compared.keys[key]]
                assert isinstance(entry, TensorStorageMetadata)
                self.compared.stored.read(
                    row_requests(self.compared.keys[key], entry, values[name], places, 0)
                )
            source = named.table.index_of(local).load(values).numpy()
            self._rows[local] = np.where(source < 0, NOWHERE, np.append(places, NOWHERE)[source])

    def _requests(self, wanted: str, value: Any) -> Iterator[PieceRequest]:
        by_index = f"{wanted}.{STORED}" in self.compared.keys
        key = self.compared.keys[f"{wanted}.{STORED}" if by_index else wanted]
        entry = self.compared.stored.entries[key]
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
            places = self.compared.stored.places_of_rows(self.compared.keys[index_of(wanted)])
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
            key: self.compared.stored.plain(own)
            for key, own in self.compared.keys.items()
            if key.startswith((MODEL, STATE))
            and isinstance(self.compared.stored.entries[own], BytesStorageMetadata)
        }
        plain = {key.removeprefix(MODEL): own for key, own in self._plain.items() if key.startswith(MODEL)}
        if plain:
            self.compared.trained.root.load_state_dict(plain, strict=False)

    def _load_optimizer(self, prefix: str, leaf: KeyedOptimizer) -> None:
        """Have an optimizer go on with what was read."""
        if isinstance(leaf, FusedOptimizer):
            keys = {name: f"{STATE}{prefix}{name}.{STEP}" for name in leaf.tables}
            read = {
                name: self.compared.wanted[key].blocks
                for name, key in keys.items()
                if key in self.compared.wanted
            }
            for name, own in read.items():
                table = leaf.tables[name]
                for (_, step), local in product(own, table.state.local):
                    table.lookup_of(local).load_step(float(step))
        for held in self.compared.trained.held(prefix, leaf):
            start = f"{STATE}{held.name}."
            for own in () if held.name in self.compared.others else held.blocks.values():
                read = {
                    entry: self._plain.get(start + entry, value)
                    for entry, value in self.compared.states[own].items()
                }
                state = {entry: value for entry, value in read.items() if value is not None}
                if state:
                    leaf.state[own] = state
        groups = self.compared.groups_of(prefix, leaf)
        if groups is not None and id(leaf) not in self.compared.unfit_groups:
            leaf.take_groups(groups)


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
