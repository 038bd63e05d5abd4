"""Shard by a sharding type of this script: a host with more memory gets more rows. Hosts come from a file."""

import argparse
import sys
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.host import PluginHost, use_host

ROWS, DIM, BATCH, RATE = 10_000, 16, 64, 0.1


class ByMemory(sw.ShardingType):
    """Neighbouring rows on all ranks, as many on each as its memory bears to that of all."""

    name, abbreviation = "by_memory", "BM"
    depends_on_shape_only = True  # and on the topology; not on a table's name

    def layouts(
        self, table: sw.TableSpec, topology: sw.Topology, constraints: sw.ParameterConstraints
    ) -> Iterable[sw.Layout]:
        """Cut the rows where the sums of memory stand."""
        memory = topology.capacity_bytes.sum(1).tolist()  # of each rank, all tiers
        ends = [table.num_embeddings * taken // sum(memory) for taken in accumulate(memory)]
        rows = sw.RowsSplit([0, *ends])
        yield sw.Layout(sw.Block(part, table.all_columns, rank) for rank, part in enumerate(rows))


@sw.hookimpl
def shardwright_sharding_types() -> list[type[sw.ShardingType]]:
    """Offer the type."""
    return [ByMemory]


def topology_of(hosts: Path) -> sw.Topology:
    """Read a host file: lines of ``name slots=RANKS memory_gib=MEMORY``, the memory of each rank in GiB.

    Raises:
        InvalidInputError: hosts have different numbers of ranks, which a `Topology` does not take.
    """
    lines = [line.split() for line in hosts.read_text().splitlines() if line and not line.startswith("#")]
    options = [dict(word.split("=") for word in words) for _, *words in lines]
    slots = {int(option["slots"]) for option in options}
    if len(slots) > 1:
        raise sw.InvalidInputError(f"{hosts}: hosts have {sorted(slots)} slots; all must have as many")
    (local,) = slots
    memory = [int(float(option["memory_gib"]) * 1024**3) for option in options for _ in range(local)]
    return sw.Topology(len(memory), "cpu", ddr_cap=memory, local_world_size=local)


def module() -> sw.EmbeddingBagCollection:
    """Make the unsharded tables, the same in every process."""
    torch.manual_seed(0)
    table = sw.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"])
    return sw.EmbeddingBagCollection([table])


def batch(step: int) -> torch.Tensor:
    """Draw the ids of a step, [BATCH, 3]."""
    return torch.randint(ROWS, (BATCH, 3), generator=torch.Generator().manual_seed(step))


def loss_of(bags: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean square of the bags' distance from 1."""
    features = sw.KeyedJaggedTensor.from_lists({"item": ids.tolist()})
    return (bags(features).values() - 1).square().mean()


def train(topology: sw.Topology, steps: int) -> tuple[list[int], torch.Tensor]:
    """Train on all ranks; return rows by rank, and the whole table."""
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": RATE})]
    constraints = {"*": sw.ParameterConstraints(sharding_types=["by_memory"])}
    planner = sw.EmbeddingShardingPlanner(topology, BATCH // topology.world_size, constraints=constraints)
    bags = module()
    plan = planner.collective_plan(bags, sharders)
    model = sw.DistributedModelParallel(bags, plan=plan, sharders=sharders)
    for step in range(steps):
        loss_of(model, batch(step)[dist.get_rank() :: topology.world_size]).backward()
    rows = [block.shard_sizes[0] for block in plan.plan[""]["item"].sharding_spec.shards]
    return rows, model.full_state_dict()["embedding_bags.item.weight"]


def train_unsharded(steps: int) -> torch.Tensor:
    """Train in one process with plain torch; return the table."""
    bags = module()
    optimizer = torch.optim.SGD(bags.parameters(), lr=RATE)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(bags, batch(step)).backward()
        optimizer.step()
    return bags.state_dict()["embedding_bags.item.weight"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hosts", type=Path, help="host file")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    with use_host(PluginHost(plugins={"by_memory": sys.modules[__name__]})):
        rows, table = train(topology_of(options.hosts), options.steps)
    if dist.get_rank() == 0:
        distance = (table - train_unsharded(options.steps)).abs().max()
        print(f"rows by rank {rows}, as one process to {'1e-6' if distance < 1e-6 else distance}")
    dist.destroy_process_group()
