"""Metrics and maps of ids on two ranks, as in one process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.contrib.torchrec.training import positions, workers

import shardwright as sw
from shardwright_testing import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, backend="gloo", initializer=functools.partial(sys.path.extend, list(sys.path))) as made:
        yield made


@pytest.mark.distributed
def test_ranks_add_up_their_samples(pool: RankPool) -> None:
    together, elsewhere = pool.run(workers.measure, 2)
    everyone = workers.metrics(window=1000)
    for batch in workers.samples(0, 2) + workers.samples(1, 3):
        for module in everyone:
            workers.count(module, batch)
    assert together == pytest.approx(workers.values(everyone))
    assert elsewhere == {}  # only rank 0 reports


@pytest.mark.distributed
def test_maps_and_tables_that_two_ranks_saved_go_on_on_three_as_in_one_process(
    pool: RankPool, tmp_path: Path
) -> None:
    steps, later = range(4), range(4, workers.ZCH_STEPS)
    first = pool.run(workers.train_mapped, 2, steps, saved=tmp_path)
    found = pool.run(workers.train_mapped, 3, later, loaded=tmp_path)
    torch.manual_seed(0)
    model = workers.mapped_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for by_rank, own in ((first, steps), (found, later)):
        torch.manual_seed(0)  # the draws of rank 0
        for place, step in enumerate(own):
            values, _ = model["mc"](workers.mapped_batch(step, *range(len(by_rank))))
            pooled = torch.cat([outputs[place] for outputs, *_ in by_rank])
            torch.testing.assert_close(pooled, values.values().detach())
            optimizer.zero_grad()
            (values.values().sum() / len(by_rank)).backward()  # ranks take the mean of their gradients
            optimizer.step()
    for _, maps, tables in found:
        assert len(maps) == 7  # of ids, rows, uses and last uses; the first counts no last uses
        for name, value in maps.items():
            assert torch.equal(value, model.state_dict()[name]), name
        for name, value in model.state_dict().items():
            torch.testing.assert_close(tables[name], value)


@pytest.mark.distributed
def test_hosts_have_groups_and_shards_become_whole(pool: RankPool) -> None:
    first, second = pool.run(workers.lead, 2)
    assert (first["groups"], second["groups"]) == ([[0], [0, 1]], [[1], [0, 1]])
    assert first["again"]
    assert second["again"]
    assert first["whole"] == {"w": [[0.0] * 3] * 2 + [[1.0] * 3] * 2, "b": [1.0, 1.0]}
    assert second["whole"] == {"w": [[0.0] * 3] * 4, "b": [1.0, 1.0]}  # sharded ones are whole on rank 0


def check_positions(found: list[dict[str, torch.Tensor]], form: str, num_ranks: int) -> None:
    """Names and values of the state are those of one process, and all have changed."""
    expected, first = positions.unsharded(form, num_ranks), positions.Model(form).state_dict()
    assert not any(torch.equal(expected[name], first[name]) for name in first)
    for state in found:
        assert list(state) == list(expected)
        torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("form", positions.FORMS)
def test_position_weights_train_alone_as_unsharded(form: str) -> None:
    env = sw.ShardingEnv.local(device_type="cpu")
    check_positions([positions.train(env, form, in_pipeline=False)], form, 1)


@pytest.mark.distributed
def test_position_weights_of_ranks_train_as_those_of_one_process(pool: RankPool) -> None:
    by_rank = pool.run(positions.train_all, 2)
    for own in by_rank:
        check_positions(own[:2], positions.FORMS[0], 2)
        check_positions(own[2:], positions.FORMS[1], 2)
