"""The demo's model on the ranks of this job: planned, sharded, and with its optimizers."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

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
from shardwright_plugins.commands._counting import CollectiveCounter
from shardwright_plugins.commands.demo.dlrm import DLRM
from shardwright_plugins.commands.demo.examples import NUM_DENSE, Examples, Table
from shardwright_plugins.commands.demo.settings import DemoSettings

__all__ = ["Batch", "ShardedDLRM", "count_collectives"]

EMBEDDING_DIM = 16
BOTTOM_SIZES = (64,)
TOP_SIZES = (64, 32)
# Tuned on the synthetic examples, one epoch, from 500 to 1600 steps of 512 to 2048.
EMBEDDING_LEARNING_RATE = 0.03
DENSE_LEARNING_RATE = 0.003


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
        module = DLRM(
            EmbeddingBagCollection(tables=[_config(table) for table in tables], device="meta"),
            NUM_DENSE,
            bottom_sizes=BOTTOM_SIZES,
            top_sizes=TOP_SIZES,
            device="meta",
        )
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


def count_collectives(model: ShardedDLRM, batch: Batch) -> int:
    """Count the collectives of the sharded tables in a training step, as torch's dispatcher sees them.

    The lookup is run forward and backward by itself, without DistributedDataParallel's collectives for the
    dense rest. Its gradients are zeros, so that row-wise Adagrad changes nothing. Every rank makes this call.
    """
    with CollectiveCounter() as counter:
        lookup: Any = model.module.module.embeddings
        pooled = lookup(batch.features).values()
        (pooled * 0.0).sum().backward()
    return counter.count


def _config(table: Table) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.num_rows,
        embedding_dim=EMBEDDING_DIM,
        feature_names=[table.feature],
    )


def _constraints(tables: tuple[Table, ...], types: tuple[str, ...]) -> dict[str, ParameterConstraints]:
    return {
        table.name: ParameterConstraints(
            sharding_types=list(types) or None, pooling_factors=[table.mean_bag_size]
        )
        for table in tables
    }
