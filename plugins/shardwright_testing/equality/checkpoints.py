"""A checkpoint of one plan, loaded under another: as a whole state dict, and in shards."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardwright.planning.layouts import stored_rows
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright_testing.equality.cases import Case, shard_case
from shardwright_testing.equality.keyed_rows import born_rows, every_row, looked_up_rows, with_keys
from shardwright_testing.equality.training import NUM_STEPS, prefixed, train_simulated
from shardwright_testing.simulated import run_simulated


def check_checkpoint(name: str, case: Case, moved: Case) -> None:
    """Check that ranks of one case load what those of the other write: whole tables, or the rows of keys."""
    where = f"{name}: a checkpoint of {case.world_size} ranks loaded by {moved.world_size}"
    # Rows that are not neighbours are stored with an index in large tables alone: here in all.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(stored_rows, "MOST_SHORT_RUNS", 0):
        (_check_keys if case.has_keys else _check_rows)(where, case, moved, folder)


def _check_rows(where: str, case: Case, moved: Case, folder: str) -> None:
    """A whole state dict under the other plan, and from there a checkpoint in shards back under the first."""
    from shardwright import load_checkpoint, save_checkpoint

    trained = train_simulated(case)[0]
    expected = {name: weight.clone() for name, weight in trained.weights.items()}
    module = moved.module()
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 7.0)  # what is not loaded shows

    def load(env: ShardingEnv) -> tuple[dict[str, Any], dict[str, Any]]:
        sharded = shard_case(moved, env, module)
        sharded.load_state_dict(expected)
        sharded.fused_optimizer.load_state_dict(trained.optimizer)
        save_checkpoint(folder, sharded)
        return sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()["state"]

    def load_shards(env: ShardingEnv) -> tuple[dict[str, Any], dict[str, Any]]:
        sharded = shard_case(case, env, module)
        load_checkpoint(folder, sharded)
        return sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()["state"]

    for form, read, under in (("", load, moved), (", in shards and back", load_shards, case)):
        results = run_simulated(read, under.world_size, local_world_size=under.local_world_size)
        for rank, (weights, state) in enumerate(results):
            _check_state(f"{where}{form}, rank {rank}", expected, trained.optimizer["state"], weights, state)


def _check_state(
    where: str,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Any]],
    loaded_weights: Mapping[str, Tensor],
    loaded_state: Mapping[str, Mapping[str, Any]],
) -> None:
    for name, weight in weights.items():
        _check_loaded(f"{where}: {name}", loaded_weights[name], weight)
        for entry, value in state.get(name, {}).items():
            loaded = torch.as_tensor(loaded_state[name][entry])
            _check_loaded(f"{where}: {entry} of {name}", loaded, torch.as_tensor(value))


def _check_keys(where: str, case: Case, moved: Case, folder: str) -> None:
    """Check that keys bring the same rows, also after a step that uses the optimizer state."""
    from shardwright import load_checkpoint, save_checkpoint

    module, moved_module = case.module_to_shard(), moved.module_to_shard()

    def write(env: ShardingEnv) -> tuple[Any, ...]:
        sharded = shard_case(case, env, module)
        born_rows(case, sharded)
        for step in range(NUM_STEPS):
            values = case.output(sharded(case.batch_to_shard(step, env.rank)))
            values.backward(case.gradient(step, env.rank, values))
        saved = sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()
        save_checkpoint(folder, sharded)
        return saved, looked_up_rows(case, sharded), _after_a_step(case, sharded)

    (state, optimizer), written, then = run_simulated(
        write, case.world_size, local_world_size=case.local_world_size
    )[0]

    def load(env: ShardingEnv) -> tuple[dict[str, Any], dict[str, Any]]:
        sharded = shard_case(moved, env, moved_module)
        sharded.load_state_dict(state)
        sharded.fused_optimizer.load_state_dict(optimizer)
        return looked_up_rows(moved, sharded), _after_a_step(moved, sharded)

    def load_shards(env: ShardingEnv) -> tuple[dict[str, Any], dict[str, Any]]:
        sharded = shard_case(moved, env, moved_module)
        load_checkpoint(folder, sharded)
        return looked_up_rows(moved, sharded), _after_a_step(moved, sharded)

    for form, read in (("", load), (", in shards", load_shards)):
        results = run_simulated(read, moved.world_size, local_world_size=moved.local_world_size)
        for rank, (loaded, later) in enumerate(results):
            _check_rows_of_keys(f"{where}{form}, rank {rank}", loaded, later, written, then)


def _check_rows_of_keys(
    where: str,
    loaded: Mapping[str, Tensor],
    later: Mapping[str, Tensor],
    written: Mapping[str, Tensor],
    then: Mapping[str, Tensor],
) -> None:
    for name, rows in written.items():
        _check_loaded(f"{where}: what keys bring of {name}", loaded[name], rows)
        after = prefixed(f"{where}: after one more step, so that optimizer state is lost: {name}")
        torch.testing.assert_close(later[name], then[name], rtol=1e-4, atol=1e-5, msg=after)


def _after_a_step(case: Case, sharded: Any) -> dict[str, Tensor]:
    """All ranks look every key up, with the same gradient: a step that is the same on any number of ranks."""
    values = case.output(sharded(with_keys(every_row(case))))
    values.backward(case.gradient(0, 0, values))
    return looked_up_rows(case, sharded)


def _check_loaded(where: str, loaded: Tensor, written: Tensor) -> None:
    assert loaded.shape == written.shape, f"{where} has shape {list(loaded.shape)}, not {list(written.shape)}"
    lost = (loaded != written).nonzero().tolist()
    assert not lost, f"{where} lost values: {len(lost)} of {written.numel()} differ, the first at {lost[:1]}"
