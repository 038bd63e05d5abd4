"""Saving of checkpoints by DCP: into a folder that is complete when it has its name, or by any storage writer."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.optim import Optimizer
from torch.serialization import get_crc32_options, set_crc32_options

from shardwright.arguments import brief
from shardwright.errors import CheckpointError, InvalidInputError, ShardwrightError
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.group_ranks import GroupRanks
from shardwright.runtime.sharded.tables.blocked_tensor import BlockedTensor
from shardwright_plugins.checkpoint.entries import EXTRA, GROUPS, Trained
from shardwright_plugins.checkpoint.files import StoredFile, StoredFiles, name_of, writing
from shardwright_plugins.checkpoint.folder import (
    complete,
    discard,
    disk_errors,
    folder_of,
    prepare,
    saving_folder,
    steps_in,
)
from shardwright_plugins.checkpoint.metadata import MANIFEST, METADATA, Manifest, reason_of

Progress: TypeAlias = Callable[[int, int], None]
"""Function called with the bytes of tensors that this rank has written or begun, and with all that it will write."""


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
        _check_numbers(step, keep)
        _check_progress(progress)
        trained, own = Trained(model, optimizers), _plain(dict(extra or {}), "extra")
        place = name_of(path) if isinstance(path, StorageWriter) else str(path)
        env.agree("the arguments of save_checkpoint()", {"path": repr(place), "step": step}, NAME_ALIKE)
        writers = _Writers.of(model)
        writers.finish()
        trained.make_one_model()
        state = _state_of(trained, model) | {f"{EXTRA}{env.rank}": own}
        manifest = Manifest(step or 0, env.world_size, plan=_plan_of(model))
        if isinstance(path, StorageWriter):
            if keep is not None:
                raise InvalidInputError(f"keep={keep}: a storage writer knows of one checkpoint alone")
            writer = _Writer(path, manifest)
        else:
            folder = _agreed_folder(Path(path), step, env)
            manifest = evolve(manifest, step=int(folder.name.rpartition("_")[2]))
            writer = _FolderWriter(folder, manifest, keep)
        env.agree("writing a checkpoint")
        planner = _Planner(progress)
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
        entries, _FolderWriter(folder, Manifest(number, env.world_size), None), _Planner(progress)
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


def _check_numbers(step: int | None, keep: int | None) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise InvalidInputError(f"{name} must be an integer from {least}, got {brief(value)}")


def _check_progress(progress: Any) -> None:
    if progress is not None and not callable(progress):
        raise InvalidInputError(
            f"progress must be a function of the bytes written and of all bytes, got {brief(progress)}"
        )


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

    def write_later(self, state: dict[str, Any], writer: _Writer, planner: SavePlanner) -> Future[None]:
        """Copy the state now; write the copy on another thread, for which the process waits at its end."""
        with closing(staging.DefaultStager(staging.StagingOptions(*[False] * 4))) as stager:
            staged = cast("dict[str, Any]", stager.stage(state))  # of torch 2.11, a stager stages once
        executor = ThreadPoolExecutor(1, "checkpoint writer")
        self._under_way = executor.submit(self.write, staged, writer, planner)
        executor.shutdown(wait=False)
        return self._under_way

    def write(self, state: dict[str, Any], writer: _Writer, planner: SavePlanner) -> None:
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

    def _write_without_group(self, state: dict[str, Any], writer: _Writer, planner: SavePlanner) -> None:
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


class _Planner(DefaultSavePlanner):
    """DCP's save planner, which reports how much of this rank's tensors is written.

    Args:
        progress: function called with the bytes written so far, and with all.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__(flatten_state_dict=False)
        self._progress, self._done, self._total = progress, 0, 0

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._total = sum(map(_bytes_of, new_plan.items))
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        count = _bytes_of(write_item)
        self._done += count
        if self._progress is not None and count:
            self._progress(self._done, self._total)
        return super().resolve_data(write_item)


class _Writer:
    """A storage writer of DCP, with checksums of its files and a manifest beside them.

    Args:
        storage: the writer. If it has no files, there is no manifest either.
        manifest: description of the checkpoint.
    """

    def __init__(self, storage: StorageWriter, manifest: Manifest) -> None:
        self._storage, self._manifest = storage, manifest
        self.place, self._files = name_of(storage), StoredFiles.of(storage)
        self.checkpoint: Any = self.place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's part, and tell rank 0 the checksums of its files as one result more."""
        with self._checked() as files, _without_checksums_of_torch():
            written = self._storage.write_data(plan, planner)
            written.wait()
        results: Any = torch.futures.Future()
        results.set_result([*written.value(), WriteResult(_FILES, 0, files)])
        return results

    @contextmanager
    def _checked(self) -> Iterator[dict[str, StoredFile]]:
        """A context in which files have checksums and errors their names; gives the checksums by name."""
        if self._files is None:
            yield {}
            return
        storage: Any = self._storage
        storage.fs = _CheckedFiles(self._files.fs)
        try:
            yield storage.fs.written
        finally:
            storage.fs = self._files.fs

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest; on rank 0, after all files were written."""
        files: dict[str, StoredFile] = {}
        for own in results:
            files |= own.pop().storage_data
        if self._files is None:
            self._storage.finish(metadata, results)
            return
        _check_files(self._files, files)
        with self._checked():
            self._storage.finish(metadata, results)
        files[METADATA] = self._files.measured(METADATA)
        write_manifest(self._files, evolve(self._manifest, files=files))

    def abandon(self) -> None:
        """Remove what was written of a checkpoint that failed, where that is known."""


_FILES = MetadataIndex("files of shardwright")


class _FolderWriter(_Writer):
    """A writer into a folder that gets its name at the end.

    Args:
        folder: folder of the step.
        manifest: description of the checkpoint.
        keep: number of checkpoints that stay.
    """

    def __init__(self, folder: Path, manifest: Manifest, keep: int | None) -> None:
        super().__init__(FileSystemWriter(saving_folder(folder)), manifest)
        self.place, self.checkpoint = str(folder), folder
        self._folder, self._keep, self._is_prepared = folder, keep, False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._storage.set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            prepare(self._folder)
            self._is_prepared = True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is: rank 0 makes the folder."""
        return plan

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest, and give the folder its name; on rank 0, after all files were written."""
        super().finish(metadata, results)
        complete(self._folder, self._keep)

    def abandon(self) -> None:
        if self._is_prepared:
            discard(self._folder)


def _bytes_of(item: WriteItem) -> int:
    """Bytes of the piece of a tensor that is to be written; none of plain data."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


@contextmanager
def _without_checksums_of_torch() -> Iterator[None]:
    """Have ``torch.save`` compute none: ours take a quarter of the time, and torch's readers do not look at its own."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _check_files(stored: StoredFiles, files: Mapping[str, StoredFile]) -> None:
    """Check that rank 0 sees what the others wrote.

    Raises:
        CheckpointError: a file is missing, or another.
    """
    for name, file in files.items():
        if not stored.exists(name) or stored.length(name) != file.bytes:
            raise CheckpointError(
                f"rank 0 does not see the file {stored.path(name)} that another rank wrote: all ranks must share the "
                "folder of checkpoints"
            )


def write_manifest(files: StoredFiles, manifest: Manifest) -> None:
    """Write a checkpoint's manifest, and have it on the disk."""
    with writing(files.path(MANIFEST), lambda: files.open(MANIFEST, "wb")) as file:
        file.write(manifest.to_json().encode())
        file.flush()
        with suppress(io.UnsupportedOperation):  # of what is no disk
            os.fsync(file.fileno())


class _CheckedFiles:
    """A file system of DCP, in which each file is written once, from its beginning, and has a checksum then.

    Attributes:
        written: length and checksum of each file that was written.
    """

    def __init__(self, fs: FileSystemBase) -> None:
        self._fs = fs
        self.written: dict[str, StoredFile] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        """Open a file."""
        with writing(path, lambda: self._fs.create_stream(path, mode)) as stream:
            yield stream
        self.written[Path(path).name] = stream.stored
