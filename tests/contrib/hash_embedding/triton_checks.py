"""Tests of ``hash_table_triton``, interpreted on the CPU or compiled on a CUDA device, run by ``test_triton.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from shardwright_hash_embedding import HashSettings, HashTable, HashTableTriton, numba_search, triton_search
from shardwright_hash_embedding.index import HashIndex
from tests.contrib.hash_embedding import test_hash_embedding as hashed
from tests.plugins.compute_kernels.triton_checks import DEVICE, FULL

import shardwright as sw
from shardwright_testing import ComputeKernelTests, RowIndexTests, run_simulated
from shardwright_testing.kernels.kernel_groups import spec_of
from shardwright_testing.kernels.keys import keys_of
from shardwright_testing.kernels.loops import block_spec

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.mark.skipif(FULL, reason="the kit runs on the CPU")
class TestHashTableTriton(ComputeKernelTests):
    optimizers = ("row_wise_adagrad",)
    extras = HashSettings(min_sightings=2).to_extras()

    @pytest.fixture
    def compute_kernel(self) -> sw.ComputeKernel:
        return HashTableTriton()


@pytest.mark.skipif(FULL, reason="the kit runs on the CPU")
class TestTritonIndex(RowIndexTests):
    @pytest.fixture
    def make_index(self) -> Callable[[int], sw.RowIndex]:
        return lambda num_rows: HashIndex(num_rows, HashSettings(), triton_search)


RULES = [HashSettings(), HashSettings("lfu", min_sightings=2), HashSettings("never", steps_to_live=4)]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rows_births_and_evictions_are_those_of_numba(rules: HashSettings) -> None:
    """Batches of several programs, whose new keys want the same slots; evictions until slots are made anew."""
    num_rows, rng = 300, np.random.default_rng(0)
    mine = HashIndex(num_rows, rules, triton_search, DEVICE)
    other = HashIndex(num_rows, rules, numba_search)
    keys = keys_of(900)
    for step in range(8):
        ids = keys[torch.from_numpy(np.minimum(rng.geometric(0.004, size=700), 900) - 1).roll(40 * step)]
        found, wanted = mine.resolve(ids.to(DEVICE), training=True), other.resolve(ids, training=True)
        assert all(torch.equal(one.cpu(), own) for one, own in zip(found, wanted, strict=True))
        assert torch.equal(mine.find(keys.to(DEVICE)).cpu(), other.find(keys))
    assert mine.num_evicted == other.num_evicted
    assert other.num_evicted > (0 if rules.evict == "never" else num_rows / 2)
    for name, value in mine.state().items():
        assert torch.equal(value.cpu(), other.state()[name])


def test_rows_fill_all_slots_but_one_and_are_found() -> None:
    """Programs take slots from each other, and go on at the first after the last."""
    keys = keys_of(600)
    slots = torch.zeros(601, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(600, device=DEVICE)
    triton_search.put(slots, keys.to(DEVICE), rows)
    assert slots.sort().values.tolist() == list(range(-600, 1))
    assert torch.equal(triton_search.find(slots, keys.to(DEVICE), keys.to(DEVICE)), rows)
    assert triton_search.find(slots, keys.to(DEVICE), keys_of(9, first=5000).to(DEVICE)).tolist() == [-1] * 9


def test_sums_and_updates_on_the_device_are_those_of_the_cpu() -> None:
    blocks = [
        block_spec(20, 8, slots=2, optimizer=spec_of("adam"), device=where, takes_any_id=True)
        for where in ("cpu", DEVICE.type)
    ]
    lookups: list[Any] = [
        HashTable().build(blocks[:1], device=torch.device("cpu")),
        HashTableTriton().build(blocks[1:], device=DEVICE),
    ]
    rng = np.random.default_rng(1)
    for _ in range(4):
        ids = keys_of(40)[torch.from_numpy(rng.integers(40, size=24))]
        results = []
        for lookup, device in zip(lookups, ("cpu", DEVICE), strict=True):
            bags = sw.Bags(
                ids.to(device), torch.full((8,), 3, dtype=torch.int32, device=device), None, ((4, 4),)
            )
            out, saved = lookup.forward(bags, training=True)
            lookup.backward(saved, out + 1)
            results.append(
                out.cpu().view(4, 2, 8) if lookup is lookups[1] else out.view(2, 4, 8).transpose(0, 1)
            )
        torch.testing.assert_close(results[1], results[0])
    weights = [lookup.weight(0).cpu() for lookup in lookups]
    torch.testing.assert_close(weights[1], weights[0])
    assert weights[0].any()


@pytest.mark.skipif(FULL, reason="simulated ranks run on the CPU")
def test_sharded_table_trains_and_loads_as_in_numba() -> None:
    setup = hashed.Setup(capacity=24, optimizer="row_wise_adagrad")
    plan = setup.plan(2)
    tables = plan.plan[""]
    triton = {**tables, "item": attrs.evolve(tables["item"], compute_kernel="hash_table_triton")}

    def work(env: sw.ShardingEnv, tables: Any) -> Any:
        sharded = setup.sharder.shard(setup.module(), tables, env, "cpu")
        outputs = hashed.train(setup, sharded, env, range(3))
        state = sharded.full_state_dict()
        sharded.load_state_dict(state)
        return outputs, state, sharded.full_state_dict()

    found, wanted = (run_simulated(lambda env, own=own: work(env, own), 2)[0] for own in (triton, tables))
    torch.testing.assert_close(found, wanted)
