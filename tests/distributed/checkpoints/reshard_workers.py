"""What the ranks of the tests of resharding do; importable by their processes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from tests.distributed.checkpoints.checkpoint_workers import DIM, ROWS, Model, layout, model_of
from tests.distributed.checkpoints.checkpoint_workers import whole as whole_if_fused
from tests.distributed.failures.faults import TIMEOUT_S
from tests.distributed.failures.strikes import strike
from tests.distributed.workers import or_error, train

import shardwright as sw
from shardwright.contracts.comm_backend import Communicator
from shardwright.planning.tables.workload import table_to_data
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.tables.table_state import row_index
from shardwright_plugins.resharding.exchange import LABEL, RowExchange


def plan_of(cut: str, kernel: str = "fused_torch") -> sw.ShardingPlan:
    sharding = {
        name: sw.ParameterSharding(cut, kernel, layout(cut, rows, dist.get_world_size()))
        for name, rows in ROWS.items()
    }
    return sw.ShardingPlan({"bags": sw.EmbeddingModuleShardingPlan(sharding)})


def whole(model: Any, dense: Any) -> dict[str, Any]:
    """All state as unsharded; of the user's optimizer, too, if that has the tables."""
    if model.fused_optimizer.params:
        return whole_if_fused(model, dense)
    state = dict(model.full_state_dict())
    for name, table in model.module.bags.sharded_tables.items():
        # A rank without a block has an empty parameter.
        own = dict(zip(table.state.local, table.block_parameters, strict=True))
        for entry in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{entry}"] = table.state.tensor(
                lambda local, own=own, entry=entry: dense.state[own[local]][entry],
                columns=DIM,
                dtype=torch.float32,
            ).full_tensor()
    for name in ("over.weight", "over.bias"):
        state |= {f"{name}.{entry}": value for entry, value in dense.state[dense.params[name]].items()}
    return {**state, "steps": sorted({float(own["step"]) for own in dense.state.values()})[-1]}


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one
    )


def trained_and_saved(cut: str, folder: str, optimizer: str, kernel: str) -> dict[str, Any]:
    """Train, save, and say what was saved."""
    model, dense = model_of(cut, 1, optimizer, kernel)
    combined = sw.CombinedOptimizer([model.fused_optimizer, dense])
    for step in range(2):
        train(model, step, dist.get_rank(), combined)
    sw.save_checkpoint(folder, model, dense)
    return whole(model, dense)


def loaded_and_resharded(
    cuts: Sequence[str], folder: str, optimizer: str, kernel: str
) -> list[dict[str, Any]]:
    """Load under the first cut, go on to the others, and save: what there is under each."""
    model, dense = model_of(cuts[0], 2, optimizer, kernel)
    sw.load_checkpoint(folder, model, dense)
    states = [whole(model, dense)]
    for cut in cuts[1:]:
        model.reshard(plan_of(cut, kernel), dense, max_extra_bytes=1 << 22)
        states.append(whole(model, dense))
    sw.save_checkpoint(folder, model, dense)
    return states


def train_through(cuts: Sequence[str], steps: int, kernel: str) -> dict[str, Any]:
    """Train, going from plan to plan between steps, with a schedule; where nothing is summed in another order."""
    model, dense = model_of(cuts[0], 1, "adam", kernel)
    combined = sw.CombinedOptimizer([model.fused_optimizer, dense])
    schedule = torch.optim.lr_scheduler.ExponentialLR(combined, gamma=0.9)
    for step in range(steps):
        if step and cuts[step % len(cuts)] != cuts[(step - 1) % len(cuts)]:
            model.reshard(plan_of(cuts[step % len(cuts)], kernel), dense)
        train(model, step, 0, combined)
        schedule.step()
    return whole(model, dense)


@or_error
def forgotten_optimizer() -> None:
    model, _ = model_of("row_wise", 1, kernel="dense")
    model.reshard(plan_of("column_wise", "dense"))


def lost_late(moment: str) -> tuple[str, bool]:
    """Which plan a model has where rank 1 is lost late in a resharding, and whether blocks and rows are its own.

    Args:
        moment: ``"rows have come"``: before the ranks have met; ``"handed over"``: when each goes over to the new plan.
    """
    env = sw.ShardingEnv.from_process_group(dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)))
    torch.manual_seed(0)
    model = sw.DistributedModelParallel(Model(), env, "cpu", plan_of("row_wise"), init_data_parallel=False)
    expected, then = dict(model.full_state_dict()), plan_of("column_wise")
    owner, name = {
        "rows have come": (RowExchange, "make"),
        "handed over": (ShardedCollection, "take_over"),
    }[moment]
    original = getattr(owner, name)

    def struck(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        strike("kill")

    with mock.patch.object(owner, name, struck), contextlib.suppress(sw.DistributedError):
        model.reshard(then)
        raise AssertionError("nothing was raised")
    collection, plan = model.module.bags, model.plan.plan["bags"]
    is_whole = all(
        plan[table].digest() == collection.inputs.params[table].digest()
        and all(
            torch.equal(
                own.weight_of(local),
                expected[f"bags.embedding_bags.{table}.weight"][row_index(local.block)][
                    :, local.block.columns.start : local.block.columns.stop
                ],
            )
            for local in own.state.local
        )
        for table, own in collection.sharded_tables.items()
    )
    return "new" if model.plan is then else "old", is_whole


def counted_exchanges(piece_bytes: int) -> tuple[int, int, int]:
    """How many exchanges of rows a resharding makes, the most bytes of one, and in how many places of memory."""
    model, dense = model_of("row_wise", 1)
    pieces: list[Any] = []  # held, so that no memory is another piece's by chance
    communicator: Communicator = model.env.communicator
    original = communicator.all_to_all

    def counted(output: Any, input: Any, *splits: Any, label: str = "") -> Any:
        if label == LABEL:
            pieces.append((output, input))
        return original(output, input, *splits, label=label)

    with mock.patch.object(communicator, "all_to_all", counted):
        model.reshard(plan_of("column_wise"), dense, piece_bytes=piece_bytes)
    places = {tensor.data_ptr() for pair in pieces for tensor in pair if tensor.numel()}
    return len(pieces), max(max(map(len, pair)) for pair in pieces), len(places)


def stated(cut: str, kernel: str, model: Any) -> sw.ShardingPlan:
    """A plan with a document that states the model's tables, as a planner writes it."""
    tables = [table_to_data(spec) for spec in model.module.bags.inputs.specs]
    return attrs.evolve(plan_of(cut, kernel), document={"inputs": {"tables": {"value": tables}}})


def forecast_and_sent(before: str, after: str, optimizer: str) -> tuple[int, int]:
    """Bytes that this rank is to send by the plans, and those that its all-to-alls are given."""
    model, dense = model_of(before, 1, optimizer)
    moves = sw.compare_plans(stated(before, "fused_torch", model), stated(after, "fused_torch", model)).moves
    assert moves.counts_states
    sent: list[int] = []
    original = model.env.communicator.all_to_all

    def counted(output: Any, input: Any, *splits: Any, label: str = "") -> Any:
        if label == LABEL:
            sent.append(input.numel())
        return original(output, input, *splits, label=label)

    with mock.patch.object(model.env.communicator, "all_to_all", counted):
        said = model.reshard(plan_of(after), dense)
    assert said.sent_bytes == sum(sent)
    return moves.by_rank.get(dist.get_rank(), (0, 0))[0], sum(sent)
