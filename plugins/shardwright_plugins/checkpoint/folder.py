"""Folders of checkpoints: one folder a step, complete from the moment that it has its name.

A checkpoint is written into ``.saving-step_N`` and renamed to ``step_N`` when all of it is on the disk. One that goes
is renamed to ``.removing-step_N`` first. So whoever reads ``step_N`` has all of it, wherever a process was killed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.errors import CheckpointError, InvalidInputError
from shardwright_plugins.checkpoint.metadata import MANIFEST, METADATA

_STEP = re.compile(r"step_(\d+)")
_SAVING, _REMOVING, _LOCK = ".saving-", ".removing-", ".lock"
_LOCKS: dict[Path, int] = {}
"""Descriptors of the locks that this process holds; the kernel lets go of them when it ends, however it ends."""


@contextmanager
def disk_errors() -> Iterator[None]:
    """A context in which errors of the system, as of a disk, are errors of checkpoints."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(str(error)) from error


def folder_of(root: Path, step: int) -> Path:
    """The folder of a step."""
    return root / f"step_{step:010d}"


def saving_folder(folder: Path) -> Path:
    """Folder in which a checkpoint is written before it is complete."""
    return folder.with_name(_SAVING + folder.name)


def steps_in(root: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder by step, rising."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = {path.name: path for path in root.iterdir()}
        steps = {int(match[1]): path for name, path in found.items() if (match := _STEP.fullmatch(name))}
        return dict(sorted(steps.items()))
    return {}


def is_checkpoint(path: Path) -> bool:
    """True if a folder is itself a checkpoint, ours or one of DCP alone."""
    return (path / MANIFEST).is_file() or (path / METADATA).is_file()


def has_checkpoint(path: Path) -> bool:
    """Return whether there is one to load: the newest in a folder, or the folder itself."""
    return is_checkpoint(path) or bool(steps_in(path))


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The checkpoint that is meant: the folder itself, or the newest step in it.

    Raises:
        CheckpointError: there is none.
    """
    if step is None and is_checkpoint(path):
        return path
    steps = steps_in(path)
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {path}")
    if step is not None and step not in steps:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return steps[max(steps) if step is None else step]


def prepare(folder: Path) -> None:
    """Make room for a checkpoint: lock the folder for this process, and clear away what killed ones left.

    Args:
        folder: folder of the step.

    Raises:
        CheckpointError: another process saves there.
        InvalidInputError: the step is there already.
    """
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    _lock(root)
    if folder.exists():
        raise InvalidInputError(
            f"{folder} is there already: give the number of the step, step=..., or another folder"
        )
    for path in root.iterdir():
        if path.name.startswith((_SAVING, _REMOVING)):
            shutil.rmtree(path)
    saving_folder(folder).mkdir()


def _lock(root: Path) -> None:
    import fcntl

    root = root.resolve()
    if root in _LOCKS:
        return
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise CheckpointError(
            f"{holder} saves its checkpoints in {root}: two jobs cannot save in one folder. Give this one another, or "
            "end the other job"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    _LOCKS[root] = descriptor


def complete(folder: Path, keep: int | None) -> None:
    """Give a checkpoint that is all on the disk its name; remove older ones.

    Args:
        folder: folder of the step.
        keep: number of checkpoints that stay: this one, and the newest of the others; all by default.
    """
    saving = saving_folder(folder)
    _sync(saving)
    saving.rename(folder)
    _sync(folder.parent)
    others = [path for path in steps_in(folder.parent).values() if path != folder]
    for path in others[: max(len(others) + 1 - keep, 0)] if keep else ():
        removed = path.with_name(_REMOVING + path.name)
        path.rename(removed)
        shutil.rmtree(removed)


def discard(folder: Path) -> None:
    """Remove what was written of a checkpoint that failed."""
    shutil.rmtree(saving_folder(folder), ignore_errors=True)


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
