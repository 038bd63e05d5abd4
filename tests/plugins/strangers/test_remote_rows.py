"""A collection whose rows another library keeps: its sharder puts that library's module in its place."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright_testing.simulated import run_simulated

ROWS, DIM, RATE, STEPS, RANKS = 20, 4, 0.1, 3, 2


class Server:
    """Rows that no rank has: gradients of all ranks update them when each has pushed."""

    def __init__(self, rows: Tensor, num_ranks: int) -> None:
        self.rows = rows.clone()
        self._pushed: dict[int, tuple[Tensor, Tensor]] = {}
        self._all = threading.Barrier(num_ranks, action=self._update, timeout=60)

    def push(self, rank: int, ids: Tensor, gradients: Tensor) -> None:
        """Add a rank's gradients to its mean, and wait for the others'."""
        self._pushed[rank] = ids, gradients
        self._all.wait()

    def _update(self) -> None:
        for rank in sorted(self._pushed):
            ids, gradients = self._pushed[rank]
            self.rows.index_add_(0, ids, gradients, alpha=-RATE / len(self._pushed))


class RemoteBags(sw.EmbeddingBagCollection):
    """A collection of one table that is to be kept by a server."""


class Asking(nn.Module):
    """What stands for it when the model is sharded: it pulls rows, and pushes their gradients."""

    def __init__(self, server: Server, rank: int, feature: str) -> None:
        super().__init__()
        self._server, self._rank, self._feature = server, rank, feature

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedTensor:
        bags = features[self._feature]
        ids = bags.values()
        rows = self._server.rows[ids].requires_grad_()
        rows.register_hook(lambda gradient: self._server.push(self._rank, ids, gradient))
        sums = nn.functional.embedding_bag(torch.arange(len(ids)), rows, bags.offsets()[:-1], mode="sum")
        return sw.KeyedTensor([self._feature], [DIM], sums)


class RemoteSharder(sw.ModuleSharder):
    """Plans nothing, and keeps no rows on the ranks."""

    module_type = RemoteBags

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server

    def tables(self, module: nn.Module, path: str = "") -> list[sw.TableSpec]:
        return []

    def shard(
        self,
        module: Any,
        params: Mapping[str, Any],
        env: sw.ShardingEnv,
        device: Any = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        assert not params
        return Asking(self.server, env.rank, module.tables[0].feature_names[0])


class Model(nn.Module):
    """Bags that a server keeps, alone or beside others, under a dense layer."""

    def __init__(self, *, beside: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        far, near = (sw.EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name]) for name in ("far", "near"))
        self.far = RemoteBags([far])
        self.near = sw.EmbeddingBagCollection([near]) if beside else None
        self.over = nn.Linear(DIM, 1)

    def forward(self, features: sw.KeyedJaggedTensor) -> Tensor:
        sums = self.far(features)["far"]
        return self.over(sums if self.near is None else sums + self.near(features)["near"]).squeeze(1)


def batch(step: int, rank: int) -> sw.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 3, (2 * 5,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return sw.KeyedJaggedTensor(["near", "far"], ids, lengths=lengths)


@pytest.mark.parametrize("beside", [False, True])
def test_rows_of_a_server_train_beside_sharded_ones_as_in_one_process(beside: bool) -> None:
    expected = Model(beside=beside)
    server = Server(expected.far.table_weight("far").detach(), RANKS)
    sharded = [Model(beside=beside) for _ in range(RANKS)]

    def train(env: sw.ShardingEnv) -> dict[str, Tensor]:
        fused = {"optimizer": "sgd", "learning_rate": RATE}
        sharders = [RemoteSharder(server), sw.EmbeddingBagCollectionSharder(fused)]
        model = sw.DistributedModelParallel(sharded[env.rank], env=env, device="cpu", sharders=sharders)
        assert set(model.sharded_modules) == ({"far", "near"} if beside else {"far"})
        for step in range(STEPS):
            model(batch(step, env.rank)).square().mean().backward()
        return model.full_state_dict()

    states = run_simulated(train, RANKS)
    tables = [parameter for name, parameter in expected.named_parameters() if not name.startswith("over")]
    optimizer = torch.optim.SGD(tables, lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (expected(batch(step, rank)).square().mean() / RANKS).backward()
        optimizer.step()
    torch.testing.assert_close(server.rows, expected.far.table_weight("far").detach())
    for state in states:
        assert not any(name.startswith("far") for name in state)
        if expected.near is not None:
            near = "near.embedding_bags.near.weight"
            torch.testing.assert_close(state[near], expected.state_dict()[near])


def test_model_with_rows_of_a_server_goes_to_another_plan() -> None:
    """The module without tables is in neither plan, and stays as it is."""
    server = Server(Model(beside=True).far.table_weight("far").detach(), RANKS)
    sharded = [Model(beside=True) for _ in range(RANKS)]
    features = batch(0, 0)

    def work(env: sw.ShardingEnv) -> bool:
        sharders = [RemoteSharder(server), sw.EmbeddingBagCollectionSharder()]
        model = sw.DistributedModelParallel(sharded[env.rank], env=env, device="cpu", sharders=sharders)
        before, asking = model(features).detach(), model.sharded_modules["far"]
        planned = model.plan.plan["near"]["near"].sharding_type
        other = "row_wise" if planned == "table_wise" else "table_wise"
        rule = {"near": sw.ParameterConstraints(sharding_types=[other])}
        topology = sw.Topology(RANKS, "cpu")
        plan = sw.EmbeddingShardingPlanner(topology, constraints=rule).plan(Model(beside=True), sharders)
        model.reshard(plan)
        assert model.plan.plan["near"]["near"].sharding_type == other
        assert model.sharded_modules["far"] is asking
        return torch.equal(model(features).detach(), before)

    assert all(run_simulated(work, RANKS))


def test_sharder_that_gives_no_module_is_refused_by_name() -> None:
    class Nothing(RemoteSharder):
        def shard(self, *args: Any, **kwargs: Any) -> Any:
            return None

    sharder = Nothing(Server(torch.zeros(ROWS, DIM), 1))
    with pytest.raises(sw.UnsupportedError, match=r"sharder Nothing broke its contract: .* 'far' gave None"):
        sw.DistributedModelParallel(
            Model(beside=False), env=sw.ShardingEnv.local(), device="cpu", sharders=[sharder]
        )
