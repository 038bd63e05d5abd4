"""What the ranks of the tests of checkpoints do; importable by their processes."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.core.runtime.plans import RowsMirrored
from tests.distributed.workers import error_of, train
from tests.errors import files_of_at_most

import shardwright as sw
from shardwright_plugins.dataflows import Replicate

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
    sharding = {
        name: sw.ParameterSharding(cut, kernel, layout(cut, rows, dist.get_world_size()))
        for name, rows in ROWS.items()
    }
    model = sw.DistributedModelParallel(
        Model(),
        plan=sw.ShardingPlan({"bags": sw.EmbeddingModuleShardingPlan(sharding)}),
        sharders=[sharder],
        device=torch.device("cpu"),
    )
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


def _unchanged(model: Any, dense: Any, before: dict[str, Any]) -> bool:
    return all(
        torch.equal(torch.as_tensor(value), before[name]) for name, value in whole(model, dense).items()
    )


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
    return text, _unchanged(model, dense, before)


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
    return subject, _unchanged(model, dense, before), sorted(path.name for path in Path(folder).iterdir())
