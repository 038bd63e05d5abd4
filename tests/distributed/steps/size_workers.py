"""Ranks that follow drawn schedules of steps, on batches whose sizes come again; importable by their processes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from tests.distributed import workers
from tests.equality import Case, Table, shardings_of
from tests.plugins.training.test_equality import kernels, sharding_types, supports
from torch import Tensor, nn

import shardwright as sw

ROWS, FEATURES, NAMES = 13, "abcd", ("bags", "rows")
PIPELINES = (sw.TrainPipelineSparseDist, sw.PrefetchTrainPipelineSparseDist, sw.TrainPipelineBase)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@frozen
class Example:
    """A rank's batch.

    Args:
        sizes: number of the sizes: of equal ones all features have as many ids. 0: there are no examples.
        seed: of ids, weights, order of features and gradients.
        wrong: the feature that a rank's batch has a wrong id of; ``None`` if it is right.
    """

    rank: int
    sizes: int
    seed: int
    wrong: int | None = None
    features: Any = None

    @classmethod
    def of(cls, *fields: Any) -> Example:
        """Make the batch with its features."""
        made = cls(*fields)
        sized, drawn = (
            torch.Generator().manual_seed(own) for own in (made.sizes, 10 * made.seed + made.rank)
        )
        is_variable, size = made.sizes > 3, (0, 3, 2, 70)[made.sizes % 4]
        sizes = [size, *(1 + (made.sizes + own) % size if is_variable and size else size for own in range(3))]
        lengths = [
            torch.randint(0, 4, (own,), generator=sized)[torch.randperm(own, generator=drawn)]
            for own in sizes
        ]
        ids = [torch.randint(0, ROWS, (int(own.sum()),), generator=drawn) for own in lengths]
        if made.wrong is not None:
            ids[made.wrong][-1:] = (-1, 1_000_000)[made.seed % 2]
        order = Random(made.seed // 6).sample(range(4), 4)
        keys, more = [FEATURES[own] for own in order], dict[str, Any]()
        if is_variable:
            places = torch.stack([torch.randint(0, max(own, 1), (size,), generator=drawn) for own in sizes])
            more = {
                "inverse_indices": (keys, places[order]),
                "stride_per_key_per_rank": [[sizes[own]] for own in order],
            }
        values = torch.cat([ids[own] for own in order]).to((torch.int64, torch.int32)[made.seed % 2])
        features = sw.KeyedJaggedTensor(
            keys,
            values,
            torch.rand(len(values), generator=drawn),
            torch.cat([lengths[own] for own in order]).int(),
            **more,
        )
        return evolve(made, features=features)

    def is_refused(self, cases: Sequence[Case]) -> bool:
        """True if tables look up the wrong id."""
        used = {name for case in cases for table in case.tables for name in table.features}
        return (
            self.wrong is not None
            and FEATURES[self.wrong] in used
            and bool(self.features[FEATURES[self.wrong]].values().numel())
        )


class Towers(nn.Module):
    """Bags and sequences of the same features; their loss is linear in the tables."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.bags, self.rows = (case.module() for case in cases)

    def forward(self, example: Example) -> tuple[Tensor, list[Tensor]]:
        bags, rows = self.bags(example.features), self.rows(example.features)
        outputs = [
            *(rows[name].values() for name in sorted(rows.keys())),
            bags.values(),
        ]  # begun first, waited for last
        drawn = torch.Generator().manual_seed(example.seed)
        loss = sum((own * (torch.rand(own.shape, generator=drawn) - 0.3)).sum() for own in outputs)
        return loss, [own.detach() for own in outputs]


def cases_of(random: Random) -> list[Case]:
    """A pooled collection and one of sequences, of any tables."""
    cases, env = [], sw.ShardingEnv.from_process_group()
    for poolings in (("SUM", "MEAN"), ("NONE",)):
        case = Case(
            (),
            (3,) * env.world_size,
            local_world_size=env.local_world_size,
            is_weighted=random.random() < 0.3,
        )
        case = case if "SUM" in poolings else evolve(case, is_weighted=False)
        while len(case.tables) < 3:
            table = Table(
                random.choice([ROWS, 400]),
                random.choice([4, 8, 12]),
                tuple(random.sample(FEATURES, random.randint(1, 2))),
                random.choice(poolings),
                random.choice(sharding_types()),
                random.choice(kernels()),
                variant=random.randrange(6),
                offset=random.randrange(2),
            )
            if supports(table.kernel, table, "sgd", world_size=env.world_size, is_weighted=case.is_weighted):
                case = evolve(case, tables=[*case.tables, table])
        cases.append(case)
    return cases


def plan_of(cases: Sequence[Case], shift: int = 0) -> sw.ShardingPlan:
    """A plan whose blocks begin so many ranks further."""
    moved = [
        evolve(case, tables=[evolve(own, offset=own.offset + shift) for own in case.tables]) for case in cases
    ]
    shardings = [
        shardings_of(case, case.sharder().tables(case.module(), name))
        for name, case in zip(NAMES, moved, strict=True)
    ]
    return sw.ShardingPlan(dict(zip(NAMES, map(sw.EmbeddingModuleShardingPlan, shardings), strict=True)))


class Follower:
    """One rank of a sharded model, beside the unsharded one, which trains on the batches of all ranks."""

    def __init__(self, random: Random) -> None:
        self.cases, self.random, self.seed = cases_of(random), random, 0
        self.kept: list[tuple[list[Tensor], list[Tensor]]] = []
        self.sizes = [[random.randrange(8) for _ in range(dist.get_world_size())] for _ in range(2)]
        self.plain, update = Towers(self.cases), random.choice(["in_backward", "in_step"])
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        plan, sharders = plan_of(self.cases), [case.sharder() for case in self.cases]
        self.model = sw.DistributedModelParallel(
            Towers(self.cases), None, "cpu", plan, sharders, update=update
        )
        self._optimize()

    def _optimize(self) -> None:
        dense = dict(sw.in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense = (
            [sw.KeyedOptimizerWrapper(dense, lambda own: torch.optim.SGD(own, lr=0.1))] if dense else []
        )
        self.optimizer = sw.CombinedOptimizer([self.model.fused_optimizer, *self.dense])

    def _batch(self, *, may_be_wrong: bool = False) -> list[Example]:
        """Each rank's batch."""
        self.seed, sizes = self.seed + 1, self.random.choice(self.sizes)
        wrong = [self.random.choice([None, None, None, 0, 1]) if may_be_wrong else None for _ in sizes]
        return [Example.of(rank, own, self.seed, wrong[rank]) for rank, own in enumerate(sizes)]

    def _look_up(self, batch: Sequence[Example]) -> Tensor:
        """Look up, and fill the memory of the batch and of what was looked up again, as loaders and users may."""
        own = batch[dist.get_rank()]
        loss, outputs = self.model(handed_over := Example.of(own.rank, own.sizes, own.seed))
        expected = torch.no_grad()(self.plain)(own)[1]
        torch.testing.assert_close(outputs, expected, **CLOSE)
        for used in (
            handed_over.features.values(),
            handed_over.features.lengths(),
            handed_over.features.weights(),
        ):
            used.zero_()
        self.kept = [*self.kept[-3:], (outputs, expected)]
        for still, before in self.kept:
            torch.testing.assert_close(still, before, **CLOSE)
        return loss

    def _update(self, batch: Sequence[Example]) -> None:
        self.plain_optimizer.zero_grad()
        (sum(self.plain(own)[0] for own in batch) / len(batch)).backward()
        self.plain_optimizer.step()

    def _back(self, loss: Tensor, batch: Sequence[Example], **how: Any) -> None:
        self.optimizer.zero_grad()
        loss.backward(**how)
        self.optimizer.step()
        self._update(batch)

    def train(self) -> None:
        self._back(self._look_up(batch := self._batch()), batch)

    def go_back_twice(self) -> None:
        loss = self._look_up(batch := self._batch())
        self._back(loss, batch, retain_graph=True)
        self._back(loss, batch)

    def go_back_in_any_order(self) -> None:
        batches = [self._batch() for _ in range(3)]
        losses = [(self._look_up(batch), batch) for batch in batches]
        for loss, batch in self.random.sample(losses, 3):
            self._back(loss, batch)

    def look_up_only(self) -> None:
        how = self.random.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        with how():
            self._look_up(self._batch())

    def reshard(self) -> None:
        self.optimizer.zero_grad()
        self.model.reshard(plan_of(self.cases, self.random.randrange(2)), *self.dense)
        self._optimize()

    def pipe(self) -> None:
        batches = [self._batch(may_be_wrong=True) for _ in range(4)]
        pipeline = self.random.choice(PIPELINES)(self.model, self.optimizer, "cpu")
        loader = iter([batch[dist.get_rank()] for batch in batches])
        for batch in batches:
            right = [Example.of(own.rank, own.sizes, own.seed) for own in batch]
            expected = torch.no_grad()(self.plain)(right[dist.get_rank()])[1]
            is_refused = any(own.is_refused(self.cases) for own in batch)
            try:
                outputs = pipeline.progress(loader)
            except sw.InvalidInputError:
                assert is_refused
                continue
            assert not is_refused
            torch.testing.assert_close(outputs, expected, **CLOSE)
            self._update(right)
        assert workers.error_of(lambda: pipeline.progress(loader)).startswith("StopIteration")


EVENTS = (
    Follower.train, Follower.go_back_twice, Follower.go_back_in_any_order, Follower.look_up_only, Follower.reshard,
    Follower.pipe, Follower.pipe,
)  # fmt: skip


def follow(seeds: Sequence[int], length: int = 8) -> None:
    """Follow a schedule for each seed, and compare what is looked up, and the tables in the end."""
    for seed in seeds:
        made = Follower(random := Random(seed))
        events = [random.choice(EVENTS) for _ in range(length)]
        try:
            for event in events:
                event(made)
            whole, expected = made.model.full_state_dict(), dict(made.plain.named_parameters())
            torch.testing.assert_close(whole, {name: own.detach() for name, own in expected.items()}, **CLOSE)
        except Exception as error:
            error.add_note(f"seed {seed}, {event.__name__} of {[own.__name__ for own in events]}")
            raise
