"""A collection of somebody else that maps ids to rows by a vocabulary, which changes while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright_testing.simulated import run_simulated

ROWS, DIM, RATE, STEPS = 12, 4, 0.1, 4
FIRST, LATER = (torch.arange(ROWS) * 1_000_003 + offset for offset in (0, 1))


def mapped_by(vocabulary: Tensor, features: sw.KeyedJaggedTensor) -> sw.KeyedJaggedTensor:
    """The batch with the row of each id, that in which the vocabulary has it."""
    rows = (features.values().unsqueeze(1) == vocabulary).int().argmax(1)
    return sw.KeyedJaggedTensor(features.keys(), rows, lengths=features.lengths())


class Mapped(sw.EmbeddingCollection):
    """Gives rows, and the batch with the numbers of the rows."""

    def __init__(self, tables: list[sw.EmbeddingConfig], vocabulary: Tensor) -> None:
        super().__init__(tables)
        self.register_buffer("vocabulary", vocabulary.clone())

    def forward(self, features: sw.KeyedJaggedTensor) -> Any:
        mapped = mapped_by(self.vocabulary, features)
        return super().forward(mapped), mapped


class Both(sw.LazyAwaitable[Any]):
    """Rows that are sent, and the batch that they are of."""

    def __init__(self, rows: Any, mapped: Any) -> None:
        super().__init__()
        self._rows, self._mapped = rows, mapped

    def _wait_impl(self) -> Any:
        return self._rows.wait(), self._mapped


class ShardedMapped(sw.ShardedEmbeddingCollection):
    """The sharded form: ids are mapped before they are sent, and the vocabulary is part of the state."""

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        self.register_buffer("vocabulary", torch.zeros(ROWS, dtype=torch.int64))
        self._mapped: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def begin_input_dist(self, features: sw.KeyedJaggedTensor | None, **further: Any) -> Any:
        if isinstance(features, sw.KeyedJaggedTensor):
            features = mapped_by(self.vocabulary, features)
        step = super().begin_input_dist(features, **further)
        self._mapped[step] = features
        return step

    def output_dist(self, step: Any) -> Any:
        return Both(super().output_dist(step), self._mapped.pop(step))


class MappedSharder(sw.EmbeddingCollectionSharder):
    """Its sharder, which takes the vocabulary over."""

    module_type, sharded_type = Mapped, ShardedMapped

    def shard(self, module: Any, *args: Any, **options: Any) -> Any:
        sharded = super().shard(module, *args, **options)
        sharded.get_buffer("vocabulary").copy_(module.vocabulary)
        return sharded


class Model(nn.Module):
    """Gives a loss, and what was looked up."""

    def __init__(self, vocabulary: Tensor = FIRST) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items = Mapped([sw.EmbeddingConfig(ROWS, DIM, "item", feature_names=["seen"])], vocabulary)

    def forward(self, features: sw.KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        rows, mapped = self.items(features)
        return rows["seen"].values().square().sum(), mapped.values()


def batch(step: int, rank: int) -> sw.KeyedJaggedTensor:
    """Ids of the first vocabulary, of which the last is renamed for the second half of the steps."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = torch.randint(0, ROWS, (7,), generator=generator)
    renamed = (rows == ROWS - 1) & (step >= STEPS // 2)
    ids = torch.where(renamed, LATER[rows], FIRST[rows])
    return sw.KeyedJaggedTensor(["seen"], ids, lengths=torch.tensor([3, 0, 4]))


def rename(items: nn.Module) -> None:
    """Give the last row to another id."""
    items.get_buffer("vocabulary")[-1] = LATER[-1]


def sharded(env: sw.ShardingEnv, model: Model) -> sw.DistributedModelParallel:
    sharders = [MappedSharder({"optimizer": "sgd", "learning_rate": RATE})]
    return sw.DistributedModelParallel(model, env=env, device="cpu", sharders=sharders)


def looped(model: Any, loader: Iterator[Any]) -> list[Tensor]:
    rows = []
    for features in loader:
        loss, own = model(features)
        loss.backward()
        rows.append(own)
    return rows


def piped(model: Any, loader: Iterator[Any]) -> list[Tensor]:
    pipeline = sw.TrainPipelineSparseDist(model, model.fused_optimizer, "cpu")
    rows = []
    while True:
        try:
            rows.append(pipeline.progress(loader))
        except StopIteration:
            return rows


@pytest.mark.parametrize("train", [looped, piped])
def test_mapped_ids_train_as_in_one_process_and_are_given_back(train: Any) -> None:
    halves = [range(STEPS // 2), range(STEPS // 2, STEPS)]
    models = [Model() for _ in range(2)]

    def work(env: sw.ShardingEnv) -> Any:
        model, rows = sharded(env, models[env.rank]), []
        for index, steps in enumerate(halves):
            if index:
                rename(model.module.items)  # every rank does
            rows += train(model, iter([batch(step, env.rank) for step in steps]))
        return rows, model.full_state_dict()

    expected, expected_rows = Model(), [[], []]
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE)
    for step in range(STEPS):
        if step == STEPS // 2:
            rename(expected.items)
        optimizer.zero_grad()
        for rank in range(2):
            loss, rows = expected(batch(step, rank))
            (loss / 2).backward()
            expected_rows[rank].append(rows)
        optimizer.step()
    for (rows, state), own in zip(run_simulated(work, 2), expected_rows, strict=True):
        assert all(map(torch.equal, rows, own))
        assert state.keys() == expected.state_dict().keys()
        torch.testing.assert_close(state, expected.state_dict())


def test_vocabulary_is_saved_and_loaded_on_another_number_of_ranks(tmp_path: Path) -> None:
    saved, loaded = [Model() for _ in range(2)], [Model(LATER) for _ in range(3)]

    def save(env: sw.ShardingEnv) -> Any:
        model = sharded(env, saved[env.rank])
        rename(model.module.items)
        sw.save_checkpoint(tmp_path, model, step=1)
        return model.full_state_dict()

    def load(env: sw.ShardingEnv) -> Any:
        model = sharded(env, loaded[env.rank])
        sw.load_checkpoint(tmp_path, model)
        return model.full_state_dict()

    expected = run_simulated(save, 2)[0]
    assert expected["items.vocabulary"].tolist() == [*FIRST[:-1].tolist(), LATER[-1].item()]
    for state in run_simulated(load, 3):
        assert all(value.equal(state[name]) for name, value in expected.items())
