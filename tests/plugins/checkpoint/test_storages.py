"""Checkpoints by storage writers and readers of DCP: fsspec's, as for object stores, and one without files."""

from __future__ import annotations

import io
from itertools import count

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.plugins.checkpoint.test_damaged import model, state_of, stepped
from tests.plugins.checkpoint.test_save_and_load import (
    BY_INDEX,
    IN_RUNS,
    OTHER_INDEX,
    assert_loaded,
    load,
    save,
)
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import shardwright as sw

NUMBERS = count()


def flipped(data):
    data[len(data) // 2] ^= 4
    return data


def rewritten(path, change):
    fs = fsspec.filesystem("memory")
    with fs.open(path, "rb") as file:
        data = bytearray(file.read())
    with fs.open(path, "wb") as file:
        file.write(change(data))


@pytest.fixture
def url():
    """A place in this process's memory that nothing else uses."""
    place = f"memory://checkpoints/{next(NUMBERS)}"
    yield place
    fsspec.filesystem("memory").rm(place, recursive=True)


@pytest.mark.parametrize("then", [IN_RUNS, OTHER_INDEX], ids=["runs", "another index"])
def test_any_plan_loads_by_fsspec_what_another_saved(then, tmp_path):
    url = f"file://{tmp_path}/7"  # files in memory have one position each, for all threads
    save(BY_INDEX, lambda: FsspecWriter(url, sync_files=False), step=7, extra={"epoch": 2})
    results = load(then, lambda: FsspecReader(url))
    assert_loaded(results, BY_INDEX.module().state_dict())
    assert {(found.step, found.extra["epoch"], found.path) for _, found in results} == {(7, 2, url)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_optimizer_goes_on_from_an_object_store(asynchronous, url):
    first, other = model(0.5), model(9.0)
    optimizers = stepped(first), stepped(other)
    writer = FsspecWriter(url, sync_files=False)
    saving = sw.save_checkpoint(writer, first, optimizers[0], asynchronous=asynchronous)
    assert saving.wait(60).path == url
    sw.load_checkpoint(FsspecReader(url), other, optimizers[1])
    assert all(map(torch.equal, state_of(other, optimizers[1]), state_of(first, optimizers[0])))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "shardwright.json"])
def test_damage_in_an_object_store_is_an_error_that_names_the_file_and_nothing_changes(name, url):
    sw.save_checkpoint(FsspecWriter(url, sync_files=False), torch.nn.Linear(4, 2))
    rewritten(f"{url}/{name}", flipped)
    model = torch.nn.Linear(4, 2)
    before = model.weight.detach().clone()
    with pytest.raises(sw.CheckpointError) as error:
        sw.load_checkpoint(FsspecReader(url), model)
    assert f"{url}/{name}" in str(error.value)
    assert torch.equal(model.weight, before)


class Shelf(dcp.StorageWriter, dcp.StorageReader):
    """A storage that keeps what it is given, without files."""

    def __init__(self):
        self.values = {}
        self.metadata = None

    def nothing(self, *args, **named):
        pass

    def unchanged(self, plan):
        return plan

    reset = set_up_storage_writer = set_up_storage_reader = nothing
    prepare_local_plan = prepare_global_plan = unchanged

    def write_data(self, plan, planner):
        written = Future()
        for item in plan.items:
            data = planner.resolve_data(item)
            is_plain = item.type is WriteItemType.BYTE_IO
            self.values[item.index] = data.getvalue() if is_plain else data.clone()
        written.set_result([WriteResult(item.index, 0, "here") for item in plan.items])
        return written

    def finish(self, metadata, results):
        metadata.storage_data = {result.index: result.storage_data for own in results for result in own}
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        return self.metadata

    def read_data(self, plan, planner):
        for item in plan.items:
            value = self.values[item.storage_index]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(value))
                continue
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                value = value.narrow(dim, start, length)
            target = planner.resolve_tensor(item)
            target.copy_(value)
            planner.commit_tensor(item, target)
        done = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return False


def test_storage_without_files_saves_and_loads_any_plan():
    shelf = Shelf()
    save(BY_INDEX, lambda: shelf)
    assert shelf.metadata.storage_data.keys() == shelf.values.keys()
    assert_loaded(load(IN_RUNS, lambda: shelf), BY_INDEX.module().state_dict())


def test_arguments_about_a_folder_are_refused_with_a_storage(url):
    model = torch.nn.Linear(4, 2)
    with pytest.raises(sw.InvalidInputError):
        sw.save_checkpoint(FsspecWriter(url, sync_files=False), model, keep=2)
    sw.save_checkpoint(FsspecWriter(url, sync_files=False), model)
    with pytest.raises(sw.InvalidInputError) as error:
        sw.load_checkpoint(FsspecReader(url), model, step=3)
    assert error.value.subject == "step"
