"""What ranks do whose exchanges travel by several process groups; importable by their processes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed import loop_workers, workers
from tests.equality import Case, RankResult, count_profiled, train_rank
from torch import Tensor, nn

import shardwright as sw

CPU, PATIENCE = torch.device("cpu"), timedelta(seconds=60)
Labels = dict[str, list[str]]


class ByExchange(sw.TorchCommunicator):
    """Ids travel by a process group of their own, as between hosts' CPUs; all else by the one that it is made for."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group, CPU)
        ranks = dist.get_process_group_ranks(process_group)
        self.of_ids = sw.TorchCommunicator(dist.new_group(ranks, timeout=PATIENCE, backend="gloo"), CPU)
        self.labels: dict[str, Counter[str]] = {"ids": Counter(), "others": Counter()}

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Any:
        self.labels["ids" if label == "ids" else "others"][label] += 1
        start = self.of_ids.all_to_all if label == "ids" else super().all_to_all
        return start(output, input, output_splits, input_splits, label=label)


class TwoChannels(sw.CommBackend):
    """gloo over two process groups."""

    name, devices = "two_channels", ("cpu",)

    def connect(self, process_group: Any) -> sw.Communicator:
        return ByExchange(process_group)


class ByHost(ByExchange):
    """What stays inside a host travels by a process group of its ranks alone, as over a faster link."""

    def __init__(self, process_group: Any, local_world_size: int) -> None:
        super().__init__(process_group)
        ranks = dist.get_process_group_ranks(process_group)
        for start in range(0, len(ranks), local_world_size):  # every rank makes all groups
            group = dist.new_group(ranks[start : start + local_world_size], timeout=PATIENCE, backend="gloo")
            if start <= self.rank < start + local_world_size:
                self._inside = sw.TorchCommunicator(group, CPU)
                self._host = slice(start, start + local_world_size)
        self.labels["inside"] = Counter()

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Any:
        if not label.endswith("inside the host"):
            return super().all_to_all(output, input, output_splits, input_splits, label=label)
        self.labels["inside"][label] += 1
        assert sum(input_splits) == sum(input_splits[self._host])  # nothing is for other hosts
        own = (output_splits[self._host], input_splits[self._host])
        return self._inside.all_to_all(output, input, *own, label=label)


class Tiers(TwoChannels):
    """gloo over a process group for each host, and two for all ranks."""

    name = "tiers"

    def connect(self, process_group: Any) -> sw.Communicator:
        return ByHost(process_group, int(os.environ["LOCAL_WORLD_SIZE"]))


def train_by_tiers(case: Case) -> tuple[RankResult, Labels]:
    """Train a case on hosts of two ranks; returns what each channel carried, too."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        return train_by_channels(case, Tiers())


def train_by_two_channels(case: Case) -> tuple[RankResult, Labels]:
    """Train a case with ids beside all else; returns what each channel carried, too."""
    return train_by_channels(case, TwoChannels())


def train_by_channels(case: Case, backend: sw.CommBackend) -> tuple[RankResult, Labels]:
    """Train a case over a comm backend; returns what each channel carried, too."""
    env = sw.ShardingEnv.from_process_group(comm_backend=backend)
    result = train_rank(case, env, case.module(), count_profiled)
    return result, {name: sorted(labels) for name, labels in env.communicator.labels.items()}  # type: ignore[attr-defined]


class Elsewhere(sw.EmbeddingBagCollection):
    """A collection that is sharded over a process group of its own."""


class ElsewhereSharder(sw.EmbeddingBagCollectionSharder):
    """Shards over the ranks of its own environment, whatever the model's."""

    module_type = Elsewhere

    def __init__(self, fused_params: Mapping[str, Any], env: sw.ShardingEnv) -> None:
        super().__init__(fused_params)
        self.env = env

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, Any],
        env: sw.ShardingEnv,
        device: Any = None,
        module_fqn: str | None = None,
    ) -> Any:
        return super().shard(module, params, self.env, device, module_fqn)


def towers() -> loop_workers.TwoTowers:
    """Two collections, the right one of the class that is sharded elsewhere."""
    model = loop_workers.TwoTowers()
    bags = model.right.sparse.bags
    model.right.sparse.bags = Elsewhere(bags.embedding_bag_configs())
    model.right.sparse.bags.load_state_dict(bags.state_dict())
    return model


def train_over_two_groups(steps: int, folder: str, *, is_piped: bool) -> tuple[Labels, dict[str, Tensor]]:
    """Train two collections over two process groups and backends, and save them.

    Returns:
        What the second group carried, and the state.
    """
    group = dist.new_group(timeout=PATIENCE, backend="gloo")
    env = sw.ShardingEnv.from_process_group(group, comm_backend=TwoChannels())
    sgd = {"optimizer": "sgd", "learning_rate": workers.LEARNING_RATE}
    sharders = [ElsewhereSharder(sgd, env), sw.EmbeddingBagCollectionSharder(sgd)]
    model = sw.DistributedModelParallel(towers(), sharders=sharders)
    assert model.module.left.sparse.bags.env.process_group is not group
    optimizer = loop_workers.dense_optimizer(model)
    if is_piped:
        batches = iter([workers.batch(step, dist.get_rank()) for step in range(steps)])
        pipeline = sw.TrainPipelineSparseDist(
            model, optimizer, CPU, custom_model_fwd=lambda batch: (model(batch).square().mean(), None)
        )
        for _ in range(steps):
            pipeline.progress(batches)
    else:
        loop_workers.train(model, range(steps), optimizer)
    labels = {name: sorted(own) for name, own in env.communicator.labels.items()}  # type: ignore[attr-defined]
    sw.save_checkpoint(folder, model, step=steps)
    return labels, model.full_state_dict()
