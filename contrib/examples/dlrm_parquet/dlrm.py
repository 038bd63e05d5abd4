"""Train a DLRM on Parquet files, read by worker processes, with a checkpoint after each epoch."""

import argparse
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright_plugins.arrow import from_arrow

DIM, GROUP = 16, 500  # columns of tables; samples of a row group, which is a rank's batch
ROWS = {"user": 200, "item": 100, "seen": 100, "country": 20}
DENSE = ["age", "price", "hour"]


def write(folder: Path, files: int = 4, groups: int = 12) -> None:
    """Write drawn clicks: what a user clicks depends on user, item, price, and the items seen before."""
    random, samples = np.random.default_rng(0), GROUP * groups
    liking = {name: random.normal(size=rows) for name, rows in ROWS.items()}
    for part in range(files):
        columns = {name: (rows * random.random(samples) ** 2).astype(int) for name, rows in ROWS.items()}
        dense = random.normal(size=(len(DENSE), samples)).astype(np.float32)
        lengths = random.integers(0, 5, samples)
        seen = (ROWS["seen"] * random.random(lengths.sum()) ** 2).astype(int)
        logits = sum(liking[name][columns[name]] for name in ("user", "item")) - dense[1]
        logits += np.bincount(np.repeat(np.arange(samples), lengths), liking["seen"][seen], samples)
        columns["seen"] = pa.ListArray.from_arrays(np.append(0, lengths.cumsum()).astype(np.int32), seen)
        columns |= dict(zip(DENSE, dense, strict=True))
        columns["clicked"] = random.random(samples) < 1 / (1 + np.exp(-logits))
        pq.write_table(pa.table(columns), folder / f"part_{part}.parquet", row_group_size=GROUP)


class Clicks(torch.utils.data.IterableDataset):
    """This rank's row groups of some files, each worker of the loader taking its share."""

    def __init__(self, files: list[Path], rank: int, ranks: int) -> None:
        self.files, self.rank, self.ranks = files, rank, ranks

    def __iter__(self) -> Iterator[tuple[torch.Tensor, sw.KeyedJaggedTensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        files = [pq.ParquetFile(file) for file in self.files]
        groups = ((file, group) for file in files for group in range(file.num_row_groups))
        for file, group in islice(groups, self.rank * workers + number, None, self.ranks * workers):
            columns = file.read_row_group(group)
            dense = np.stack([columns[name].to_numpy() for name in DENSE], 1)
            clicked = columns["clicked"].to_numpy().astype(np.float32)
            yield torch.from_numpy(dense), from_arrow(columns, keys=list(ROWS)), torch.from_numpy(clicked)


class DLRM(torch.nn.Module):
    """Dense features and tables meet in the products of their vectors (Naumov et al., arXiv:1906.00091)."""

    def __init__(self) -> None:
        super().__init__()
        tables = [sw.EmbeddingBagConfig(rows, DIM, name, feature_names=[name]) for name, rows in ROWS.items()]
        self.bags = sw.EmbeddingBagCollection(tables)
        self.bottom = nn.Sequential(nn.Linear(len(DENSE), 32), nn.ReLU(), nn.Linear(32, DIM))
        vectors = 1 + len(tables)
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)
        width = vectors * DIM + self.pairs.shape[1]
        self.over = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, features: sw.KeyedJaggedTensor) -> torch.Tensor:
        """Logits of a click, [samples]."""
        found = self.bags(features).values().unflatten(1, (-1, DIM))
        vectors = torch.cat([self.bottom(dense)[:, None], found], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.over(torch.cat([vectors.flatten(1), products], 1)).squeeze(1)


def train(folder: Path, epochs: int) -> dict[str, float]:
    """Train on all files but the last; return log losses on the last, the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    *training, held_out = sorted(folder.glob("*.parquet"))
    torch.manual_seed(0)
    fused = {"optimizer": "row_wise_adagrad", "learning_rate": 0.05}
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params=fused)]
    model = sw.DistributedModelParallel(DLRM(), sharders=sharders)  # planned by default
    rest = dict(sw.in_backward_optimizer_filter(model.named_parameters()))
    optimizer = sw.KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=3e-3))
    log_loss = nn.functional.binary_cross_entropy_with_logits
    for epoch in range(epochs):
        loader = torch.utils.data.DataLoader(Clicks(training, rank, ranks), batch_size=None, num_workers=2)
        for dense, features, clicked in sw.lockstep_batches(model, loader):
            optimizer.zero_grad()
            log_loss(model(dense, features), clicked).backward()
            optimizer.step()
        sw.save_checkpoint(folder / "checkpoints", model, optimizer, step=epoch + 1, keep=1)
    sums = torch.zeros(3)
    with torch.no_grad():
        for dense, features, clicked in sw.lockstep_batches(model, Clicks([held_out], rank, ranks)):
            loss = log_loss(model(dense, features), clicked).item()
            sums += torch.tensor([loss, clicked.mean(), 1.0])
    dist.all_reduce(sums)
    loss, share = (sums[:2] / sums[2]).tolist()
    return {"constant": -share * math.log(share) - (1 - share) * math.log(1 - share), "model": loss}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Parquet files, drawn if there are none, and checkpoints")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and not list(options.folder.glob("*.parquet")):
        write(options.folder)
    dist.barrier()
    losses = train(options.folder, options.epochs)
    if dist.get_rank() == 0:
        print(f"log loss of a constant {losses['constant']:.3f}, of the model {losses['model']:.3f}")
    dist.destroy_process_group()
