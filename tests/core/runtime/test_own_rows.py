"""Tables in a row format that core has never heard of: a stranger's collection, sharder and kernel."""

from __future__ import annotations

import pytest
import torch
from tests.core.runtime.plans import Cut, RowsMirrored
from tests.own_rows import Bringing, OwnBags, OwnBagsSharder, OwnRows, kernel_of

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright.planning.layouts.row_maps import RowsRange
from shardwright_testing.simulated import run_simulated

CUTS = (
    Cut(11, 9, ("a",), "SUM", RowsRange(11, parts=2), (3, 4), (0, 1), "own_rows"),
    Cut(9, 5, ("b", "a"), "MEAN", RowsMirrored(9, 3), (1,), (1, 0), "own_rows"),
    Cut(7, 8, ("b",), "SUM", None, (), (1,), "own_rows"),
)


@pytest.fixture(params=[8, 4, 2])
def rows(request):
    own = OwnRows(f"OWN{request.param}", request.param)
    with use_host(PluginHost(entry_points=(), plugins={"own": Bringing(kernel_of(own))}, environment={})):
        yield own


def bags(rows):
    tables = [
        sw.EmbeddingBagConfig(
            num_embeddings=cut.rows,
            embedding_dim=cut.dim,
            name=f"t{index}",
            feature_names=list(cut.features),
            data_type=rows.name,
            pooling=cut.pooling,
        )
        for index, cut in enumerate(CUTS)
    ]
    return OwnBags(tables, rows)


def batch(rank):
    lengths = torch.tensor([2, 0, 3, 1])
    ids = (torch.arange(6) * 3 + rank) % 7
    return sw.KeyedJaggedTensor(keys=["b", "a"], values=ids, lengths=lengths)


def on_two_ranks(rows, work):
    module = bags(rows)
    shardings = {
        f"t{index}": sw.ParameterSharding("cut", cut.kernel, cut.layout()) for index, cut in enumerate(CUTS)
    }

    def run(env):
        return work(OwnBagsSharder().shard(module, shardings, env, "cpu"), env.rank)

    return run_simulated(run, 2)


def test_rows_cut_anywhere_are_looked_up_as_whole_ones(rows):
    module = bags(rows)
    for rank, values in enumerate(on_two_ranks(rows, lambda sharded, rank: sharded(batch(rank)).values())):
        torch.testing.assert_close(values, module(batch(rank)).values())


def test_state_is_the_stored_rows_bit_by_bit_and_loads_again(rows):
    expected = bags(rows).state_dict()
    changed = {name: stored.flip(0) for name, stored in expected.items()}

    def work(sharded, rank):
        before = {name: stored.clone() for name, stored in sharded.full_state_dict().items()}
        sharded.load_state_dict(changed)
        return before, sharded.full_state_dict(), dict(sharded.named_parameters())

    for before, after, parameters in on_two_ranks(rows, work):
        assert {*before} == {*after} == {*expected}
        assert not any(parameter.requires_grad for parameter in parameters.values())
        for name, stored in expected.items():
            assert torch.equal(before[name], stored)
            assert torch.equal(after[name], changed[name])


def test_state_of_another_width_is_refused(rows):
    def work(sharded, rank):
        with pytest.raises(RuntimeError, match=r"table 't2' \(7 x 8 OWN") as error:
            sharded.load_state_dict({"embedding_bags.t2.weight": torch.zeros(7, 8)}, strict=False)
        return str(error.value)

    on_two_ranks(rows, work)


def test_checkpoints_of_them_in_blocks_are_refused(rows):
    def work(sharded, rank):
        weight = sharded.state_dict()["embedding_bags.t2.weight"]
        with pytest.raises(sw.UnsupportedError, match=rows.name):
            weight.__create_write_items__("weight", weight)
        with pytest.raises(sw.UnsupportedError, match=rows.name):
            weight.__create_chunk_list__()
        return True

    assert on_two_ranks(rows, work) == [True, True]
