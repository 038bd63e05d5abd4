from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from tests.core.planning.conftest import FirstFit
from tests.drawn import drawn

from shardwright import (
    Block,
    InvalidInputError,
    Layout,
    Misfit,
    NoPlanError,
    ParameterConstraints,
    ProposedShards,
    RowsRange,
    TableSpec,
    Topology,
)
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.search.ruled_placement import broken_rule, place_within
from shardwright.planning.tables.constraints import Constraints

TABLES = [TableSpec(name, 8, 8, ["f"]) for name in "abcdef"]


def rules_of(ranks=3, local=None, **asked):
    topology = Topology(ranks, "cpu", local_world_size=local)
    return RankRules.of(
        Constraints({k: ParameterConstraints(**v) for k, v in asked.items()}), TABLES, topology
    )


def shards_of(tables, *, sizes=None, ranks=3, room=100):
    count = len(tables)
    return ProposedShards(
        shard=np.arange(count),
        table=np.array(tables),
        cost_ms=np.ones(count),
        memory_bytes=np.array(sizes or [1] * count)[:, None],
        tiers=("ddr",),
        capacity_bytes=np.full((ranks, 1), room),
    )


def test_place_within_no_rules_is_the_partitioners_answer():
    shards = shards_of(range(6))
    np.testing.assert_array_equal(place_within(None, FirstFit(), shards), FirstFit().place(shards))


def test_place_within_a_pinned_table_takes_of_memory_alone(monkeypatch):
    """Its rank is fixed; to what balances resources, one more would make that rank look full."""
    seen, place = [], FirstFit.place
    monkeypatch.setattr(FirstFit, "place", lambda self, shards: seen.append(shards) or place(self, shards))
    place_within(rules_of(a={"ranks": 2}, b={"ranks": [0, 1]}), FirstFit(), shards_of(range(6)))
    (asked,) = seen
    assert asked.rank.tolist() == [2, *[-1] * 5]
    assert [bool(needs.any()) for needs in asked.memory_bytes[:, 1:]] == [False, True, *[False] * 4]


def test_place_within_apart_tables_leave_ranks_for_one_another():
    # Two shards each: spread over all ranks, the first table would leave none for the others.
    rules = rules_of(**{name: {"apart": "y"} for name in "abc"})
    ranks = place_within(rules, FirstFit(), shards_of([0, 0, 1, 1, 2, 2]))
    assert broken_rule(rules, shards_of([0, 0, 1, 1, 2, 2]), ranks) == ""


def test_place_within_pinned_beyond_the_memory_is_a_misfit_of_all_that_is_pinned_there():
    rules = rules_of(a={"ranks": 0}, b={"ranks": 0})
    misfit = place_within(rules, FirstFit(), shards_of(range(6), sizes=[50, 60, 60, 60, 60, 60]))
    assert isinstance(misfit, Misfit)
    assert (misfit.table, misfit.rank, misfit.is_fixed) == (1, 0, True)
    assert (misfit.needed_bytes, misfit.free_bytes) == (110, 100)


def test_place_within_apart_tables_leave_ranks_to_those_that_may_use_no_other():
    held = {"ranks": [0, 2], "apart": "y"}
    rules = rules_of(a={"apart": "y"}, b=held, c=held)
    assert place_within(rules, FirstFit(), shards_of(range(6))).tolist()[:3] == [1, 0, 2]


@drawn(st.data(), quick=50, thorough=300)
def test_place_within_never_breaks_a_rule_or_a_capacity(data):
    asked = {}
    for name in "abcdef":
        fields = {
            "ranks": data.draw(st.none() | st.sets(st.integers(0, 2), min_size=1).map(sorted)),
            "together": data.draw(st.none() | st.sampled_from("xz")),
            "apart": data.draw(st.none() | st.sampled_from("yw")),
        }
        asked[name] = {key: value for key, value in fields.items() if value is not None}
    try:
        rules = rules_of(**asked)
    except NoPlanError:
        return  # what contradicts itself has tests of its own
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=6, max_size=6))
    shards = shards_of(range(6), sizes=sizes, room=data.draw(st.integers(5, 12)))
    placed = place_within(rules, FirstFit(), shards)
    if not isinstance(placed, Misfit):
        assert broken_rule(rules, shards, placed) == ""
        assert (shards.used_bytes(placed) <= shards.capacity_bytes).all()


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            {
                "a": {"together": "x", "ranks": [0, 1]},
                "b": {"together": "x"},
                "c": {"together": "x", "ranks": 2},
                "d": {"together": "x", "ranks": [1, 2]},
            },
            r"'a', 'b', 'c', 'd' are kept together on one rank, and pinned to ranks of which none is common: "
            r"'a' to ranks 0, 1; 'c' to ranks 2; 'd' to ranks 1, 2\.",
        ),
        (
            {"a": {"together": "x", "apart": "y"}, "b": {"together": "x", "apart": ["y", "z"]}},
            "'a', 'b' are kept together on one rank, and apart",
        ),
        (
            {"a": {"apart": "y"}, "b": {"apart": "y", "ranks": 1}, "c": {"apart": "y", "ranks": 1}},
            r"2 tables, '[bc]', '[bc]', are kept apart and may use 1 rank together \(1\)",
        ),
        ({"*": {"apart": "y"}}, r"6 tables, 'a', 'b', .*'f', are kept apart and may use 3 ranks"),
    ],
)
def test_rank_rules_that_contradict_each_other_raise_naming_the_tables(asked, text):
    with pytest.raises(NoPlanError, match=f"contradict each other: {text}"):
        rules_of(**asked)


def test_rank_rules_rank_that_does_not_exist_raises():
    with pytest.raises(
        InvalidInputError, match=r"table 'a' .* ranks has 3; the topology has 3 ranks, 0 to 2"
    ):
        rules_of(a={"ranks": [1, 3]})


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"a": {"together": "x"}, "b": {"together": "x"}}, "has 3 blocks, and is kept together with 'b'"),
        ({"a": {"ranks": [0, 1]}}, "has blocks on the ranks 2, which 'ranks' does not allow"),
        (
            {"a": {"apart": "y"}, "b": {"apart": "y"}},
            "has blocks that must live on given ranks, and is kept apart",
        ),
        ({"a": {"apart": "y"}}, ""),
        ({"b": {"ranks": 1}}, ""),
    ],
)
def test_rank_rules_refuse_layouts_that_cannot_follow_them(asked, refusal):
    rows = RowsRange(8, parts=3)
    layout = Layout([Block(part, TABLES[0].all_columns, rank) for rank, part in enumerate(rows)])
    rules = rules_of(**asked)
    answer = rules.refusal(0, layout) if rules else ""
    assert answer.startswith(refusal)
    assert bool(answer) == bool(refusal)


def test_rank_rules_refuse_gangs_that_no_host_can_take():
    rows = RowsRange(8, parts=2)
    layout = Layout(
        [Block(part, TABLES[0].all_columns, host_group=0, local_rank=i) for i, part in enumerate(rows)]
    )
    assert rules_of(4, 2, a={"ranks": [1, 2]}).refusal(0, layout).startswith("has blocks that share a host")
    assert rules_of(4, 2, a={"ranks": [2, 3]}).refusal(0, layout) == ""
