"""What the ranks of the tests of checkpoints and of resharding do; importable by their processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from tests.core.runtime.plans import RowsMirrored
from tests.distributed.failures.strikes import env_of, strike
from tests.distributed.workers import or_error, train
from tests.errors import error_of, files_of_at_most

import shardwright as sw
from shardwright.contracts.comm_backend import Communicator
from shardwright.planning.tables.workload import table_to_data
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.tables.table_state import row_index
from shardwright_plugins.dataflows import Replicate
from shardwright_plugins.resharding.exchange import LABEL, RowExchange

ROWS = {"user": 2500, "item": 1300}  # more than are stored as runs of single rows
DIM = 8


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        configs = [
            sw.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=features)
            for (name, rows), features in zip(ROWS.items(), (["user"], ["item", "liked"]), strict=True)
        ]
        self.bags = sw.EmbeddingBagCollection(configs, device="cpu")
        self.over = torch.nn.Linear(3 * DIM, 1)

    def forward(self, features: Any) -> torch.Tensor:
        return self.over(self.bags(features).values()).squeeze(1)


def layout(cut: str, rows: int, world_size: int) -> sw.Layout:
    """A table's blocks, none of them where another cut has it."""
    row_map: sw.RowMap = sw.RowsRange(rows)
    edges: tuple[int, ...] = (0, DIM)
    if cut == "row_wise":
        row_map = sw.RowsRange(rows, parts=world_size)
    elif cut == "modulo":
        row_map = sw.RowsModulo(rows, parts=world_size)
    elif cut == "hashed":
        row_map = RowsMirrored(rows, world_size + 1)
    elif cut == "column_wise":
        edges = (0, 2, 5, DIM)
    blocks = [sw.Block(part, sw.ColumnRange(*span)) for part in row_map for span in pairwise(edges)]
    if cut == "data_parallel":
        return sw.Layout(blocks * world_size, Replicate()).placed(range(world_size))
    return sw.Layout(blocks).placed([(place + 1) % world_size for place in range(len(blocks))])


def model_of(cut: str, seed: int, optimizer: str = "adam", kernel: str = "fused_torch") -> Any:
    """A sharded model and the optimizer of its dense rest."""
    torch.manual_seed(seed)
    sharder = sw.EmbeddingBagCollectionSharder(
        fused_params=None if kernel == "dense" else {"optimizer": optimizer, "learning_rate": 0.1 * seed}
    )
    plan, device = plan_of(cut, kernel), torch.device("cpu")
    model = sw.DistributedModelParallel(Model(), plan=plan, sharders=[sharder], device=device)
    own = dict(sw.in_backward_optimizer_filter(model.named_parameters()))
    dense = sw.KeyedOptimizerWrapper(own, lambda params: torch.optim.Adam(params, lr=0.01 * seed))
    return model, dense


def whole(model: Any, dense: Any) -> dict[str, Any]:
    """All state as unsharded, with what goes by hyperparameters."""
    fused, rest = model.fused_optimizer.full_state_dict(), dense.state_dict()
    state = {
        f"{name}.{entry}": value
        for name, entries in [*fused["state"].items(), *rest["state"].items()]
        for entry, value in entries.items()
    }
    rates = [group["lr"] for group in [*fused["param_groups"], *rest["param_groups"]]]
    return {**model.full_state_dict(), **state, "lr": torch.tensor(rates)}


def train_on(cut: str, folder: str, first: int, last: int, *, asynchronous: bool) -> dict[str, Any]:
    """Load what there is, go on, and save every second step while training goes on."""
    model, dense = model_of(cut, seed=2)
    if Path(folder).exists():
        sw.load_checkpoint(folder, model, dense)
    optimizer, saving = sw.CombinedOptimizer([model.fused_optimizer, dense]), None
    for step in range(first, last):
        train(model, step, dist.get_rank(), optimizer)
        if step % 2:
            saving = sw.save_checkpoint(
                folder, model, dense, step=step, keep=2, asynchronous=asynchronous, extra={"step": step}
            )
    if saving is not None:
        saving.wait(60)
    return whole(model, dense)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.as_tensor(value).clone() for name, value in state.items()}


def load_damaged(folder: str, fault: str) -> tuple[str, bool]:
    """Damage the file that the last rank wrote, and load: the error with its class, and if the model is unchanged."""
    first, dense = model_of("row_wise", seed=1)
    path = sw.save_checkpoint(folder, first, dense).path
    if dist.get_rank() == 0:
        damage(path / f"__{dist.get_world_size() - 1}_0.distcp", fault)
    dist.barrier()
    model, dense = model_of("column_wise", seed=2)
    before = _copied(whole(model, dense))
    text = error_of(lambda: sw.load_checkpoint(folder, model, dense))
    return text, same(whole(model, dense), before)


def damage(path: Path, fault: str) -> None:
    """Cut a file short, flip a bit of it, or remove it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-9] if fault == "cut" else data)


def save_in_vain(folder: str, fault: str) -> tuple[str, bool, list[str]]:
    """Save where that is impossible: what the error is about, if the model is as it was, and what is in the folder.

    Args:
        folder: where it is saved once before.
        fault: ``"full disk"``, of the last rank's, or ``"read-only"``.
    """
    model, dense = model_of("row_wise", seed=1)
    sw.save_checkpoint(folder, model, dense, step=1)
    before, subject = _copied(whole(model, dense)), ""
    is_full = fault == "full disk" and dist.get_rank() == dist.get_world_size() - 1
    try:
        with files_of_at_most(50_000) if is_full else nullcontext():
            # No process may make files in /sys, not even the superuser's.
            sw.save_checkpoint("/sys/checkpoints" if fault == "read-only" else folder, model, dense, step=2)
    except sw.CheckpointError as error:
        subject = str(error.subject)
    dist.barrier()
    return subject, same(whole(model, dense), before), sorted(path.name for path in Path(folder).iterdir())


def plan_of(cut: str, kernel: str = "fused_torch") -> sw.ShardingPlan:
    sharding = {
        name: sw.ParameterSharding(cut, kernel, layout(cut, rows, dist.get_world_size()))
        for name, rows in ROWS.items()
    }
    return sw.ShardingPlan({"bags": sw.EmbeddingModuleShardingPlan(sharding)})


def whole_of_any(model: Any, dense: Any) -> dict[str, Any]:
    """All state as unsharded; of the user's optimizer, too, if that has the tables."""
    if model.fused_optimizer.params:
        return whole(model, dense)
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
    return whole_of_any(model, dense)


def loaded_and_resharded(
    cuts: Sequence[str], folder: str, optimizer: str, kernel: str
) -> list[dict[str, Any]]:
    """Load under the first cut, go on to the others, and save: what there is under each."""
    model, dense = model_of(cuts[0], 2, optimizer, kernel)
    sw.load_checkpoint(folder, model, dense)
    states = [whole_of_any(model, dense)]
    for cut in cuts[1:]:
        model.reshard(plan_of(cut, kernel), dense, max_extra_bytes=1 << 22)
        states.append(whole_of_any(model, dense))
    sw.save_checkpoint(folder, model, dense)
    return states


@or_error
def forgotten_optimizer() -> None:
    model, _ = model_of("row_wise", 1, kernel="dense")
    model.reshard(plan_of("column_wise", "dense"))


def lost_late(moment: str) -> tuple[str, bool]:
    """Which plan a model has where rank 1 is lost late in a resharding, and whether blocks and rows are its own.

    Args:
        moment: ``"rows have come"``: before the ranks have met; ``"handed over"``: when each goes over to the new plan.
    """
    env = env_of()
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


@contextlib.contextmanager
def noted_exchanges(model: Any) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Output and input of each exchange of rows; they are held, so that no memory is another one's by chance."""
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    communicator: Communicator = model.env.communicator
    original = communicator.all_to_all

    def noted(output: Any, input: Any, *splits: Any, label: str = "") -> Any:
        if label == LABEL:
            pieces.append((output, input))
        return original(output, input, *splits, label=label)

    with mock.patch.object(communicator, "all_to_all", noted):
        yield pieces


def counted_exchanges(piece_bytes: int) -> tuple[int, int, int]:
    """How many exchanges of rows a resharding makes, the most bytes of one, and in how many places of memory."""
    model, dense = model_of("row_wise", 1)
    with noted_exchanges(model) as pieces:
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
    with noted_exchanges(model) as pieces:
        said = model.reshard(plan_of(after), dense)
    sent = sum(given.numel() for _, given in pieces)
    assert said.sent_bytes == sent
    return moves.by_rank.get(dist.get_rank(), (0, 0))[0], sent
