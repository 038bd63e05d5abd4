"""A search: proposals, placements, what is checked of both, and by which objective plans are rated."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.contracts import Partitioner, Proposer, ShardingType
from shardwright.errors import PlanningError, UnknownNameError
from shardwright.host import host
from shardwright.planning.layouts.layout import Block, Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.search_space import estimate_costs
from shardwright.planning.search.objectives import largest_rank_time, step_time
from shardwright.planning.search.search import search
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner

TABLES = [TableSpec("a", 10, 8, ["f"]), TableSpec("b", 7, 4, ["g"]), TableSpec("c", 3, 8, ["h"])]


def space_of(tables=TABLES, *, ddr_cap=10_000, ranks=2, local_world_size=None):
    topology = Topology(ranks, "cpu", ddr_cap=ddr_cap, local_world_size=local_world_size)
    options = enumerate_options(tables, topology, Constraints(), host(), batch_size=4)
    make = host().estimators.create
    return estimate_costs(options, topology, make("cells"), make("weights"), topology.capacity_bytes)


def run(space, proposer, partitioner=None, **limits):
    partitioner = partitioner or host().partitioners.create("first_fit")
    return search(space, [proposer], partitioner, host().extensions, **limits)


class Fixed(Proposer):
    """Yields what it was made with, and keeps what it was told."""

    name = "fixed"

    def __init__(self, *proposals):
        self.given, self.heard = proposals, []

    def proposals(self, space):
        for proposal in self.given:
            self.heard.append((yield np.array(proposal)))


class Unruly(Partitioner):
    name = "unruly"

    def __init__(self, answer):
        self.answer = answer

    def place(self, shards):
        return self.answer(shards)


def test_search_more_proposals_are_never_worse():
    space = space_of()
    values = [run(space, host().proposers.create("each_alone"), max_proposals=n).value_ms for n in (1, 5, 99)]
    assert values == sorted(values, reverse=True)


def test_search_endless_proposer_is_ended():
    class Endless(Proposer):
        name = "endless"

        def proposals(self, space):
            while True:
                yield space.options.first_option[:-1].copy()

    assert run(space_of(), Endless(), max_proposals=10).num_proposals == 1


@pytest.mark.parametrize("proposal", [[6, 14], [14, 6, 22], [6, 14, 99]])
def test_search_proposal_that_is_none_raises(proposal):
    with pytest.raises(PlanningError, match="proposer 'fixed' broke its contract"):
        run(space_of(), Fixed(proposal))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda s: np.full(len(s), 2), "a rank from 0 to 1"),
        (lambda s: np.zeros(1, dtype=np.int64), "gave 1 ranks for 2 shards"),
        (lambda s: np.zeros(len(s)), r"an array of whole numbers; it gave a ndarray of float64 \[2\]"),
    ],
)
def test_search_placement_that_breaks_the_contract_raises(answer, text):
    with pytest.raises(PlanningError, match=rf"partitioner 'unruly' broke its contract.*{text}"):
        run(space_of(), Fixed([2, 14, 22]), Unruly(answer))


def test_search_placement_over_capacity_raises():
    with pytest.raises(PlanningError, match="rank 0 was given 528 bytes of ddr, it has 400"):
        run(space_of(ddr_cap=400), Fixed([6, 14, 22]), Unruly(lambda s: np.zeros(len(s.rank), dtype=int)))


class Pair(ShardingType):
    """Two column blocks on one host of two ranks, the second on its rank 1."""

    name, abbreviation = "pair", "PA"
    offered = "always"

    def layouts(self, table, topology, constraints):
        yield Layout(
            [
                Block(table.all_rows, table.columns(0, 2), host_group=0),
                Block(table.all_rows, table.columns(2, table.embedding_dim), host_group=0, local_rank=1),
            ]
        )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0, 1, 2, 3], None),
        ([1, 1, 0, 1], None),
        (
            [0, 1, 3, 2],
            "shard 3 must have rank 1 of the 2 of its host, and was placed on rank 2, which is 0 of host 1",
        ),
        (
            [0, 3, 2, 3],
            "shards 0 and 1 must be on one host, and were placed on ranks 0 and 3, of hosts 0 and 1",
        ),
    ],
)
def test_search_placement_that_parts_a_gang_raises(host_with, ranks, text):
    with host_with(sharding_types=[Pair]):
        space = space_of(TABLES[:2], ranks=4, local_world_size=2)
        answer = Unruly(lambda shards: np.array(ranks))
        if text is None:
            assert run(space, Fixed([0, 2]), answer).plan.ranks.tolist() == ranks
        else:
            with pytest.raises(PlanningError, match=f"partitioner 'unruly' broke its contract: {text}"):
                run(space, Fixed([0, 2]), answer)


PHASES = {"forward": np.array([3.0, 1.0]), "backward": np.array([1.0, 4.0])}


def test_objectives_differ_where_phases_have_different_slowest_ranks():
    assert largest_rank_time(PHASES) == 5.0
    assert step_time(PHASES) == 7.0


def test_planner_unknown_objective_raises_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no objective 'step_tim'.*Did you mean 'step_time'\?"):
        EmbeddingShardingPlanner(objective="step_tim")
