"""Checkpoints that are damaged: an error that says where, or the right numbers; never other numbers, and no change."""

from __future__ import annotations

import os
import pickle
import random
import shutil

import pytest
import torch
from tests.errors import files_of_at_most, raises
from tests.plugins.checkpoint.stored import save_of_ranks

import shardwright as sw
from shardwright_plugins.checkpoint import folder
from shardwright_plugins.checkpoint.metadata import metadata_from
from shardwright_plugins.checkpoint.reading import StoredCheckpoint

SHAPE = (40, 3)


def model(value: float = 0.5) -> torch.nn.Module:
    made = torch.nn.ModuleDict({"one": torch.nn.Embedding(*SHAPE), "two": torch.nn.Linear(4, 2)})
    torch.manual_seed(0)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * value)
    return made


def stepped(made: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(made.parameters(), lr=0.1)
    made["one"](torch.arange(5)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path):
    made = model()
    optimizer = stepped(made)
    return sw.save_checkpoint(tmp_path / "own", made, optimizer, step=1, extra={"epoch": 3}).path


def state_of(made, optimizer):
    return [p.detach().clone() for p in made.parameters()] + [
        torch.as_tensor(value).clone() for state in optimizer.state.values() for value in state.values()
    ]


def loaded_into_another(path):
    made = model(9.0)
    optimizer = stepped(made)
    before = state_of(made, optimizer)
    try:
        sw.load_checkpoint(path, made, optimizer)
    except sw.CheckpointError as error:
        assert all(map(torch.equal, state_of(made, optimizer), before)), "the model was changed"
        return str(error), None
    return None, state_of(made, optimizer)


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path, place=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("__0_0.distcp", cut, "were written"),
        ("__0_0.distcp", flip, "its checksum is another"),
        ("__0_0.distcp", lambda path: path.unlink(), "cannot be read"),
        (".metadata", flip, "its checksum is another"),
        (".metadata", cut, "were written"),
        (".metadata", lambda path: path.unlink(), "cannot be read"),
        ("shardwright.json", flip, "is damaged"),
        ("shardwright.json", cut, "is damaged"),
    ],
)
def test_damaged_file_is_named_and_nothing_changes(name, damage, text, saved):
    damage(saved / name)
    error, _ = loaded_into_another(saved)
    assert error is not None
    assert text in error
    assert name in error


def test_what_a_lost_file_held_is_named(saved):
    (saved / "__0_0.distcp").unlink()
    assert "'model.one.weight'" in loaded_into_another(saved)[0]


def mutations(count, seed):
    """Files, and what becomes of their bytes."""
    drawn = random.Random(seed)
    for _ in range(count):
        name = drawn.choice(["__0_0.distcp", ".metadata", "shardwright.json"])
        yield name, drawn.choice(["flip", "cut", "zero", "insert"]), drawn.random(), drawn.randrange(1, 256)


def mutated(data: bytes, kind: str, where: float, value: int) -> bytes:
    place = int(where * len(data))
    head, tail = data[:place], data[place:]
    return {
        "flip": head + bytes([tail[0] ^ value]) + tail[1:],
        "cut": head,
        "zero": head + bytes(min(value, len(tail))) + tail[value:],
        "insert": head + bytes([value]) + tail,
    }[kind]


def assert_error_or_right(saved, files, expected, count, seed):
    errors = 0
    for name, kind, where, value in mutations(count, seed):
        if name not in files:
            continue
        (saved / name).write_bytes(mutated(files[name], kind, where, value))
        error, state = loaded_into_another(saved)
        assert error is not None or all(map(torch.equal, state, expected)), (name, kind, where, value)
        errors += error is not None
        (saved / name).write_bytes(files[name])
    return errors


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_mutated_checkpoint_is_an_error_or_has_the_right_numbers(seed, saved):
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    expected = loaded_into_another(saved)[1]
    assert assert_error_or_right(saved, files, expected, count=250, seed=seed) > 200


def test_mutated_metadata_without_a_manifest_is_an_error_or_readable(saved):
    data = (saved / ".metadata").read_bytes()
    drawn = random.Random(1)
    for _ in range(300):
        place = drawn.randrange(len(data))
        changed = data[:place] + bytes([drawn.randrange(256)]) + data[place + 1 :]
        if chr(changed[place]) in "rj":
            continue  # a place in the unpickler's memory so far away that it would take gigabytes
        try:
            metadata_from(changed, "here")
        except sw.CheckpointError:
            continue


class Runs:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_metadata_that_would_run_something_is_refused(tmp_path):
    with pytest.raises(
        sw.CheckpointError, match=r"it names (posix|nt)\.mkdir, which metadata have no use for"
    ):
        metadata_from(pickle.dumps(Runs(tmp_path / "ran")), "here")
    assert not (tmp_path / "ran").exists()


def test_entry_that_would_run_something_is_refused(tmp_path):
    save_of_ranks(
        [{"model": model().state_dict(), "extra": {"0": Runs(tmp_path / "ran")}}], tmp_path / "foreign"
    )
    with pytest.raises(sw.CheckpointError, match=r"'extra\.0' cannot be read"):
        sw.load_checkpoint(tmp_path / "foreign", model(), dcp_only=True)
    assert not (tmp_path / "ran").exists()


def test_file_names_that_lead_elsewhere_are_refused(saved):
    metadata = StoredCheckpoint(saved).metadata
    next(iter(metadata.storage_data.values())).relative_path = "../other"
    with pytest.raises(sw.CheckpointError, match=r"is in a file called '\.\./other'"):
        metadata_from(pickle.dumps(metadata), "here")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_is_an_error_that_names_the_file_and_leaves_no_rest(tmp_path, asynchronous):
    sw.save_checkpoint(tmp_path, model(), step=1)
    file = tmp_path / ".saving-step_0000000002" / "__0_0.distcp"
    with files_of_at_most(1000), raises(sw.CheckpointError, subject=str(file)):
        sw.save_checkpoint(tmp_path, model(), step=2, asynchronous=asynchronous).wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step_0000000001"]
    sw.save_checkpoint(tmp_path, model(), step=2)


def test_path_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(sw.CheckpointError, match="cannot be written"):
        sw.save_checkpoint(tmp_path / "file", model(), step=1)


def test_what_killed_saves_left_is_cleared_away_and_never_taken_for_a_checkpoint(saved):
    root = saved.parent
    shutil.copytree(saved, root / ".saving-step_0000000007")
    shutil.copytree(saved, root / ".removing-step_0000000000")
    assert list(folder.steps_in(root)) == [1]
    sw.save_checkpoint(root, model(), step=2)
    assert sorted(path.name for path in root.iterdir()) == [".lock", "step_0000000001", "step_0000000002"]
