"""A checkpoint of one plan, loaded under another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.testing.cases import Case, shard_case
from shardwright.testing.keyed_rows import born_rows, every_row, looked_up_rows, with_keys
from shardwright.testing.simulated import run_simulated
from shardwright.testing.training import NUM_STEPS, prefixed, train_simulated


def check_checkpoint(name: str, case: Case, moved: Case) -> None:
    """Check that ranks of one case load what those of the other write: whole tables, or the rows of keys."""
    where = f"{name}: a checkpoint of {case.world_size} ranks loaded by {moved.world_size}"
    (_check_keys if case.has_keys else _check_rows)(where, case, moved)


def _check_rows(where: str, case: Case, moved: Case) -> None:
    trained = train_simulated(case)[0]
    expected = {name: weight.clone() for name, weight in trained.weights.items()}
    module = moved.module()
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 7.0)  # what is not loaded shows

    def load(env: ShardingEnv) -> tuple[dict[str, Any], dict[str, Any]]:
        sharded = shard_case(moved, env, module)
        sharded.load_state_dict(expected)
        sharded.fused_optimizer.load_state_dict(trained.optimizer)
        return sharded.state_dict(), sharded.fused_optimizer.state_dict()["state"]

    for rank, (weights, state) in enumerate(
        run_simulated(load, moved.world_size, local_world_size=moved.local_world_size)
    ):
        for name, weight in expected.items():
            _check_loaded(f"{where}, rank {rank}: {name}", weights[name], weight)
            for entry, value in trained.optimizer["state"].get(name, {}).items():
                loaded = torch.as_tensor(state[name][entry])
                _check_loaded(f"{where}, rank {rank}: {entry} of {name}", loaded, torch.as_tensor(value))


def _check_keys(where: str, case: Case, moved: Case) -> None:
    """Check that keys bring the same rows, also after a step that uses the optimizer state."""
    module, moved_module = case.module_to_shard(), moved.module_to_shard()

    def write(env: ShardingEnv) -> tuple[Any, ...]:
        sharded = shard_case(case, env, module)
        born_rows(case, sharded)
        for step in range(NUM_STEPS):
            values = case.output(sharded(case.batch_to_shard(step, env.rank)))
            values.backward(case.gradient(step, env.rank, values))
        saved = sharded.state_dict(), sharded.fused_optimizer.state_dict()
        return saved, looked_up_rows(case, sharded), _after_a_step(case, sharded)

    (state, optimizer), written, then = run_simulated(
        write, case.world_size, local_world_size=case.local_world_size
    )[0]

    def load(env: ShardingEnv) -> tuple[dict[str, Any], dict[str, Any]]:
        sharded = shard_case(moved, env, moved_module)
        sharded.load_state_dict(state)
        sharded.fused_optimizer.load_state_dict(optimizer)
        return looked_up_rows(moved, sharded), _after_a_step(moved, sharded)

    for rank, (loaded, later) in enumerate(
        run_simulated(load, moved.world_size, local_world_size=moved.local_world_size)
    ):
        for name, rows in written.items():
            _check_loaded(f"{where}, rank {rank}: what keys bring of {name}", loaded[name], rows)
            after = prefixed(
                f"{where}, rank {rank}: after one more step, so that optimizer state is lost: {name}"
            )
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
