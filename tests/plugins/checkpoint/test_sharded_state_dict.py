"""State in shards, saved and loaded by torch.distributed.checkpoint alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from attrs import evolve
from tests.core.runtime.mixed_cuts import case_of, simulate
from tests.core.runtime.plans import Cut, Cuts
from tests.plugins.checkpoint.stored import load_one, save_of_ranks
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from shardwright import RowsModulo, RowsRange, RowsSplit, UnsupportedError
from shardwright.runtime.sharded.tables.blocked_tensor import BlockedTensor
from shardwright_plugins.dataflows import Replicate
from shardwright_testing.simulated import run_simulated

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# One collection of three tables, cut in ways that have nothing in common.
OTHERS = [
    Cuts((Cut(11, 4, ("a",)), Cut(9, 6, ("b", "a")), Cut(7, 3, ("b",))), 1),
    Cuts(
        (
            Cut(11, 4, ("a",), row_map=RowsModulo(11, parts=3), ranks=(2, 0, 1)),
            Cut(9, 6, ("b", "a"), edges=(1, 5), ranks=(0, 1, 2)),
            Cut(7, 3, ("b",), dataflow=Replicate(), ranks=(0, 1, 2)),
        ),
        3,
    ),
    Cuts(
        (
            Cut(11, 4, ("a",), row_map=RowsSplit((0, 1, 1, 11)), edges=(2,), ranks=(1, 0)),
            Cut(9, 6, ("b", "a"), row_map=RowsRange(9, parts=4), ranks=(0, 1, 1, 0)),
            Cut(7, 3, ("b",), row_map=RowsRange(7, parts=2), ranks=(1, 0)),
        ),
        2,
    ),
]


def saved(case, folder):
    states = simulate(case, lambda sharded, batch, env: {"model": sharded.state_dict()})
    save_of_ranks(states, folder)
    return case.module().state_dict()


def blank(module):
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    return module


@pytest.mark.parametrize("then", OTHERS, ids=["one rank", "modulo, columns, copies", "rows and columns"])
def test_any_plan_loads_what_another_saved(then, tmp_path):
    expected = saved(case_of(), tmp_path)
    module = blank(then.module())

    def work(env):
        sharded = then.shard(env, module)
        state = {"model": sharded.state_dict()}
        load_one(state, tmp_path)
        sharded.load_state_dict(state["model"])
        return sharded.full_state_dict()

    for state in run_simulated(work, then.world_size):
        assert all(torch.equal(state[name], weight) for name, weight in expected.items())


def test_no_collective_and_names_shapes_and_dtypes_of_the_unsharded_module():
    case = case_of()

    def work(sharded, batch, env):
        before = list(env.communicator.labels)
        state, optimizer = sharded.state_dict(), sharded.fused_optimizer.state_dict()
        return env.communicator.labels == before, state, optimizer

    expected = case.module().state_dict()
    for is_silent, state, optimizer in simulate(case, work):
        assert is_silent
        assert {n: (v.shape, v.dtype) for n, v in state.items()} == {
            n: (v.shape, v.dtype) for n, v in expected.items()
        }
        assert optimizer["param_groups"][0]["params"] == sorted(expected)


def test_copies_are_written_once_and_read_by_all(tmp_path):
    case = OTHERS[1]
    states = simulate(case, lambda sharded, batch, env: sharded.state_dict())
    written = [
        sum(piece.is_written for piece in state["embedding_bags.t2.weight"].pieces) for state in states
    ]
    assert written == [1, 0, 0]
    assert all(len(state["embedding_bags.t2.weight"].__create_chunk_list__()) == 1 for state in states)


@pytest.mark.parametrize(
    "then", [case_of(), *OTHERS[1:]], ids=["same plan", "modulo, columns, copies", "rows and columns"]
)
def test_sharded_tensors_of_another_model_load_under_any_plan_of_these_ranks(then):
    case = case_of() if then.world_size == 2 else evolve(case_of(), world_size=3)
    expected, module = case.module().state_dict(), blank(then.module())

    def work(sharded, batch, env):
        other = then.shard(env, module)
        other.load_state_dict(sharded.state_dict())
        other.fused_optimizer.load_state_dict(sharded.fused_optimizer.state_dict())
        return other.full_state_dict()

    for state in simulate(case, work):
        assert all(torch.equal(state[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value + 1,
        torch.norm,
        lambda value: torch.zeros(11, 4).copy_(value),
        pickle.dumps,
        copy.copy,
    ],
    ids=["sum", "norm", "copy into a tensor", "pickle", "shallow copy"],
)
def test_what_needs_elements_of_other_ranks_is_refused(use):
    states = simulate(case_of(), lambda sharded, batch, env: sharded.state_dict())
    value = states[0]["embedding_bags.t0.weight"]
    assert isinstance(value, BlockedTensor)
    with pytest.raises(UnsupportedError) as error:
        use(value)
    assert "full_state_dict()" in str(error.value)


def copied_by_torch(state):
    """As a storage writer that stages copies a state dict."""
    return _copy_state_dict(state, _create_cpu_state_dict(state))


@pytest.mark.parametrize("stage", [lambda state: StateDictStager().stage(state), copied_by_torch])
def test_what_is_staged_for_an_asynchronous_save_is_what_was(stage):
    expected = case_of().module().state_dict()

    def work(sharded, batch, env):
        state = sharded.state_dict()
        staged = stage(dict(state))
        for value in state.values():
            for piece in value.pieces:
                piece.values.fill_(-1)
        return {name: value.full_tensor() for name, value in staged.items()}

    for state in simulate(case_of(), work):
        assert all(torch.equal(state[name], weight) for name, weight in expected.items())
