"""The deep learning recommendation model (Naumov et al. 2019, arXiv:1906.00091), planned, sharded, with its optimizers.

Shapes: B examples, F dense features, D columns of each table, T tables.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ShardingEnv,
    ShardingPlan,
    Topology,
)
from shardwright.optim import CombinedOptimizer, KeyedOptimizerWrapper, in_backward_optimizer_filter
from shardwright_plugins.commands.demo.examples import NUM_DENSE, Examples, Table
from shardwright_plugins.commands.demo.settings import DemoSettings

EMBEDDING_DIM = 16
BOTTOM_SIZE, TOP_SIZES = 64, (64, 32)
# Tuned on the synthetic examples, one epoch, from 500 to 1600 steps of 512 to 2048.
EMBEDDING_LEARNING_RATE = 0.03
DENSE_LEARNING_RATE = 0.003


class DLRM(nn.Module):
    """Dense features through an MLP, pooled embeddings, their pairwise products, and an MLP over it all.

    Args:
        embeddings: tables of one width with one feature each.
        device: device of the MLPs; ``meta`` takes no memory.
    """

    def __init__(self, embeddings: EmbeddingBagCollection, device: torch.device | str) -> None:
        super().__init__()
        configs = embeddings.embedding_bag_configs()
        self._dim, self._num_tables = configs[0].embedding_dim, len(configs)
        num_products = (1 + self._num_tables) * self._num_tables // 2
        self.embeddings = embeddings
        self.bottom = nn.Sequential(
            nn.Linear(NUM_DENSE, BOTTOM_SIZE, device=device),
            nn.ReLU(),
            nn.Linear(BOTTOM_SIZE, self._dim, device=device),
            nn.ReLU(),
        )
        self.top = nn.Sequential(
            nn.Linear(self._dim + num_products, TOP_SIZES[0], device=device),
            nn.ReLU(),
            nn.Linear(TOP_SIZES[0], TOP_SIZES[1], device=device),
            nn.ReLU(),
            nn.Linear(TOP_SIZES[1], 1, device=device),
        )

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """Compute the logits of a click.

        Args:
            dense: ``[B, F]``.
            features: the ids of each table.

        Returns:
            ``[B]`` logits.
        """
        # The lookup is begun first and waited for last: a sharded one talks to other ranks meanwhile.
        pooled = self.embeddings(features)
        bottom = self.bottom(dense)
        vectors = pooled.values().view(len(dense), self._num_tables, self._dim)
        logits: Tensor = self.top(interact(bottom, vectors)).squeeze(1)
        return logits


def interact(dense: Tensor, embeddings: Tensor) -> Tensor:
    """Put the dense vector beside the dot products of all pairs of vectors.

    Args:
        dense: ``[B, D]``.
        embeddings: ``[B, T, D]``.

    Returns:
        ``[B, D + (T + 1) * T / 2]``: the products of (1, 0), (2, 0), (2, 1), ..., where 0 is the dense vector.
    """
    vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
    num_vectors = vectors.size(1)
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=dense.device)
    # One index into the flattened products: two into the square take thrice the time.
    return torch.cat([dense, products.index_select(1, rows * num_vectors + columns)], dim=1)


@attrs.frozen(eq=False)
class Batch:
    """Examples as the model takes them, on its device.

    Attributes:
        dense: [B, D].
        features: One key a table.
        labels: [B].
    """

    dense: Tensor
    features: KeyedJaggedTensor
    labels: Tensor

    @classmethod
    def of(cls, examples: Examples, tables: tuple[Table, ...], device: torch.device) -> Batch:
        """Bring examples to the device."""
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=[table.feature for table in tables],
            values=torch.from_numpy(examples.ids),
            lengths=torch.from_numpy(np.ascontiguousarray(examples.lengths).ravel()),
        )
        return cls(
            dense=torch.from_numpy(examples.dense).to(device),
            features=features.to(device),
            labels=torch.from_numpy(examples.labels).to(device),
        )


class ShardedDLRM:
    """The planned and sharded model of one rank, and how it learns."""

    def __init__(
        self,
        tables: tuple[Table, ...],
        settings: DemoSettings,
        env: ShardingEnv,
        device: torch.device,
        *,
        init_data_parallel: bool = True,
    ) -> None:
        """Build on meta, plan, shard. Every rank makes this call.

        Args:
            tables: What to embed.
            settings: Of the run.
            env: The ranks.
            device: Of this rank.
            init_data_parallel: Average gradients of the dense layers; else somebody who wraps the model does.
        """
        torch.manual_seed(settings.seed)
        self._env = env
        self._settings = settings
        collection = EmbeddingBagCollection(tables=[_config(table) for table in tables], device="meta")
        module = DLRM(collection, device="meta")
        sharders = [
            EmbeddingBagCollectionSharder(
                fused_params={"optimizer": "row_wise_adagrad", "learning_rate": EMBEDDING_LEARNING_RATE}
            )
        ]
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=env.world_size, compute_device=device.type),
            batch_size=settings.batch_size // env.world_size,
            constraints=_constraints(tables, settings.types),
        )
        self.plan: ShardingPlan = planner.collective_plan(module, sharders, dist.group.WORLD)
        self.module = DistributedModelParallel(
            module,
            env=env,
            plan=self.plan,
            sharders=sharders,
            device=device,
            init_data_parallel=init_data_parallel,
        )
        self.dense_optimizer = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.module.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=DENSE_LEARNING_RATE),
        )
        self.optimizer = CombinedOptimizer([self.module.fused_optimizer, self.dense_optimizer])

    def train_step(self, batch: Batch) -> float:
        """Learn from this rank's share of a global batch. Every rank makes this call.

        Returns:
            The mean loss of this rank's examples before the step.
        """
        logits = self.module(batch.dense, batch.features)
        self.optimizer.zero_grad()
        loss = self.loss(logits, batch.labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()) * self._share / len(batch.labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss to go backward, whose average over the ranks is the mean loss over the global batch.

        Gradients are averaged over ranks, whose shares of the batch may differ in size by one.

        Args:
            logits: [B] of this rank's share.
            labels: [B].
        """
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return losses / self._share

    @property
    def _share(self) -> float:
        """Mean number of examples of a rank's share of a batch."""
        return self._settings.batch_size / self._env.world_size

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """[B] logits. Every rank makes this call."""
        logits: Tensor = self.module(batch.dense, batch.features)
        return logits


def _config(table: Table) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.num_rows,
        embedding_dim=EMBEDDING_DIM,
        feature_names=[table.feature],
    )


def _constraints(tables: tuple[Table, ...], types: tuple[str, ...]) -> dict[str, ParameterConstraints]:
    return {
        table.name: ParameterConstraints(sharding_types=list(types) or None, pooling_factors=[table.mean_bag])
        for table in tables
    }
