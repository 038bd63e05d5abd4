"""Saving of checkpoints by DCP: into a folder that is complete when it has its name, or by any storage writer."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter
from torch.optim import Optimizer

from shardwright.arguments import NonNegativeInt, PositiveInt, check
from shardwright.errors import CheckpointError, InvalidInputError, ShardwrightError
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.group_ranks import GroupRanks
from shardwright.runtime.sharded.tables.blocked_tensor import BlockedTensor
from shardwright_plugins.checkpoint.entries import EXTRA, GROUPS, Trained
from shardwright_plugins.checkpoint.files import name_of
from shardwright_plugins.checkpoint.folder import (
    disk_errors,
    folder_of,
    steps_in,
)
from shardwright_plugins.checkpoint.metadata import Manifest, reason_of
from shardwright_plugins.checkpoint.writers import CheckedWriter, FolderWriter, Progress, ProgressPlanner


@frozen(eq=False)
class SavedCheckpoint:
    """A checkpoint that is saved, or being saved.

    Args:
        path: its folder, or the checkpoint_id of a storage writer.
        step: number of the training step.

    Example:
        >>> import tempfile, shardwright as sw
        >>> bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])])
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = sw.save_checkpoint(folder, model, step=1, asynchronous=True).wait()
        >>> saved.step
        1
    """

    path: Path | str
    step: int
    _work: Future[None]

    def wait(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Return when it is complete on the disk.

        Args:
            timeout_s: seconds to wait at most.

        Raises:
            CheckpointError: it could not be saved; the same on every rank.
            TimeoutError: it is not complete yet.
        """
        self._work.result(timeout_s)
        return self

    @property
    def is_complete(self) -> bool:
        """True if all of it is on the disk."""
        return self._work.done() and self._work.exception() is None


def save_checkpoint(
    path: str | os.PathLike[str] | StorageWriter,
    model: nn.Module,
    *optimizers: Optimizer,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    progress: Progress | None = None,
) -> SavedCheckpoint:
    """Save a model, its optimizers and what else training needs, each rank its own blocks; every rank makes this call.

    A checkpoint is a folder ``step_N`` in ``path`` that ``torch.distributed.checkpoint`` reads as well. It has its name
    from the moment that all of it is on the disk, so that whoever reads sees the older one or the newer one.

    Args:
        path: folder of the checkpoints of one job, which all ranks see. Or a storage writer of
            ``torch.distributed.checkpoint`` for this checkpoint alone, which is complete when the call has returned.
        model: sharded or not; its fused optimizer is saved with it.
        optimizers: those of the dense rest, keyed or not.
        step: number of the training step; by default one after the newest in the folder, and 0 for a storage writer.
        extra: plain data of this rank's own: position of its data loader, state of a scheduler, of random numbers.
        keep: number of checkpoints that stay in the folder: this one, and the newest of the others; all by default. A
            storage writer knows of no others.
        asynchronous: return as soon as the state is copied in host memory; another thread writes it.
        progress: function called with the bytes of tensors that this rank has written so far, and with all that it
            will write; piece by piece, on the thread that writes. An error of it fails the save.

    Returns:
        The checkpoint; its ``wait()`` returns when an asynchronous one is complete. The next save waits for it.

    Raises:
        InvalidInputError: an argument is wrong, or the step is there already.
        CheckpointError: it could not be written, or another job saves there.
        DistributedError: ranks gave different paths or steps; or a rank did not make this call, or was lost in it.

    All ranks raise, and an error of the same class.

    Example:
        >>> import tempfile, shardwright as sw
        >>> table = sw.EmbeddingBagConfig(
        ...     name="user_id", num_embeddings=1000, embedding_dim=8, feature_names=["user"]
        ... )
        >>> bags = sw.EmbeddingBagCollection([table], device="meta")
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> folder = tempfile.mkdtemp()
        >>> sw.save_checkpoint(folder, model, step=100, extra={"epoch": 2}).path.name
        'step_0000000100'
        >>> sw.load_checkpoint(folder, model).extra
        {'epoch': 2}
    """
    env = env_of(model)
    with env.together("save_checkpoint()"):
        check("step", step, NonNegativeInt | None)
        check("keep", keep, PositiveInt | None)
        check("progress", progress, Callable[..., Any] | None)
        trained, own = Trained(model, optimizers), _plain(dict(extra or {}), "extra")
        place = name_of(path) if isinstance(path, StorageWriter) else str(path)
        env.agree("the arguments of save_checkpoint()", {"path": repr(place), "step": step}, NAME_ALIKE)
        writers = _Writers.of(model)
        writers.finish()
        trained.make_one_model()
        state = _state_of(trained, model) | {f"{EXTRA}{env.rank}": own}
        manifest = Manifest(int(step or 0), env.world_size, plan=_plan_of(model))
        if isinstance(path, StorageWriter):
            if keep is not None:
                raise InvalidInputError(f"keep={keep}: a storage writer knows of one checkpoint alone")
            writer = CheckedWriter(path, manifest)
        else:
            folder = _agreed_folder(Path(path), step, env)
            manifest = evolve(manifest, step=int(folder.name.rpartition("_")[2]))
            writer = FolderWriter(folder, manifest, keep)
        env.agree("writing a checkpoint")
        planner = ProgressPlanner(progress)
        if not asynchronous:
            writers.write(state, writer, planner)
            return SavedCheckpoint(writer.checkpoint, manifest.step, _done())
        return SavedCheckpoint(writer.checkpoint, manifest.step, writers.write_later(state, writer, planner))


def save_entries(entries: dict[str, Any], folder: Path, progress: Progress | None = None) -> None:
    """Save entries by this process alone.

    Args:
        entries: entries by their names in the checkpoint.
        folder: folder of the checkpoint, named after its step.
        progress: function called with the bytes of tensors written so far, and with those of all.
    """
    number = int(folder.name.rpartition("_")[2])
    env = ShardingEnv.local(device_type="cpu")
    _Writers(env).write(
        entries, FolderWriter(folder, Manifest(number, env.world_size), None), ProgressPlanner(progress)
    )


def env_of(model: nn.Module) -> ShardingEnv:
    """The ranks that train a model, of all sharding groups; this process alone for one that is not sharded."""
    env = getattr(model, "env", None)
    return env.everyone if isinstance(env, ShardingEnv) else ShardingEnv.local(device_type="cpu")


def _of_first_group(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The entries that this rank writes: of replicas of tables, those of the first sharding group."""
    env = getattr(model, "env", None)
    if not isinstance(env, ShardingEnv) or 0 in env.ranks_of_all:
        return state
    return {
        key: BlockedTensor(value.shape, value.dtype) if isinstance(value, BlockedTensor) else value
        for key, value in state.items()
    }


def _agreed_folder(root: Path, step: int | None, env: ShardingEnv) -> Path:
    """The folder of the step, as rank 0 has it."""
    if step is None and env.rank == 0:
        with disk_errors():
            step = max(steps_in(root), default=0) + 1
    env.agree("naming a checkpoint")
    return folder_of(root, env.communicator.broadcast_object(step))


def _state_of(trained: Trained, model: nn.Module) -> dict[str, Any]:
    """Entries of model and optimizers that this rank writes, checked to be plain data where it is no tensor."""
    state = _of_first_group(trained.to_save(), model)
    _plain(state[GROUPS], "the optimizers' param_groups")
    return state


def _plan_of(model: nn.Module) -> Mapping[str, Any] | None:
    plan = getattr(model, "plan", None)
    return json.loads(plan.to_json()) if isinstance(plan, ShardingPlan) else None


def _plain(value: Any, what: str) -> Any:
    """Check that a value can be read back without unpickling anything.

    Raises:
        InvalidInputError: it cannot.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidInputError(
            f"{what} must be plain data: numbers, texts, None, lists, tuples and dicts of them, and tensors. "
            f"{reason_of(error)}"
        ) from error
    return value


NAME_ALIKE = "Give every rank the same path and step"


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class _Writers:
    """The ranks that save, with a channel of their own, so that another thread may write while training goes on."""

    _known: WeakKeyDictionary[nn.Module, _Writers] = WeakKeyDictionary()

    def __init__(self, env: ShardingEnv) -> None:
        self._env = env
        self._under_way: Future[None] | None = None
        self._group = None
        if env.process_group is not None and env.world_size > 1:
            # What is said while files are written is in the host's memory, whatever device the tables are on.
            backend = dist.Backend.default_device_backend_map["cpu"]
            ranks = GroupRanks.of(env.process_group)
            self._group = ranks.new_group("checkpoints", backend=backend)

    @classmethod
    def of(cls, model: nn.Module) -> _Writers:
        """Those of a model, made by all of them together."""
        known = cls._known.get(model)
        if known is None:
            known = cls._known[model] = cls(env_of(model))
        return known

    def finish(self) -> None:
        """Wait for what is being written, and raise if that failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def write_later(self, state: dict[str, Any], writer: CheckedWriter, planner: SavePlanner) -> Future[None]:
        """Copy the state now; write the copy on another thread, for which the process waits at its end."""
        with closing(staging.DefaultStager(staging.StagingOptions(*[False] * 4))) as stager:
            staged = cast("dict[str, Any]", stager.stage(state))  # of torch 2.11, a stager stages once
        executor = ThreadPoolExecutor(1, "checkpoint writer")
        self._under_way = executor.submit(self.write, staged, writer, planner)
        executor.shutdown(wait=False)
        return self._under_way

    def write(self, state: dict[str, Any], writer: CheckedWriter, planner: SavePlanner) -> None:
        """Write a state; what one rank cannot do, raises on all.

        Raises:
            CheckpointError: a rank failed; the error has its text.
            DistributedError: a rank was lost, which is named.
        """
        try:
            if self._group is None:
                self._write_without_group(state, writer, planner)
                return
            ranks, what = GroupRanks.of(self._group), f"writing {writer.place}"
            with ranks.together(what), ranks.named(what):
                storage = cast("StorageWriter", writer)
                save(state, storage_writer=storage, planner=planner, process_group=self._group)
        except (Exception, CheckpointException) as error:  # DCP's is none of the former
            writer.abandon()
            if isinstance(error, CheckpointException):
                raise _as_one(error, writer.place) from error
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"{writer.place} cannot be written: {error}", subject=writer.place
                ) from error
            raise

    def _write_without_group(
        self, state: dict[str, Any], writer: CheckedWriter, planner: SavePlanner
    ) -> None:
        """Save as ``dcp.save`` does, by the communicator's collectives: for one rank, and for simulated ones."""
        gather, rank = self._env.communicator.all_gather_objects, self._env.rank
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans = gather(writer.prepare_local_plan(planner.create_local_plan()))
        metadata = None
        if rank == 0:
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
        own = self._env.communicator.broadcast_object(plans)[rank]
        written = writer.write_data(planner.finish_plan(own), planner)
        results = gather(written.value())
        if metadata is not None:
            writer.finish(metadata, results)
        self._env.communicator.barrier()


def _as_one(error: CheckpointException, place: str) -> ShardwrightError:
    """One error for all ranks: what the first that failed had to say."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, ShardwrightError):
        return cause
    return CheckpointError(
        f"{place} cannot be written: rank {rank}: {type(cause).__name__}: {cause}", subject=place
    )
