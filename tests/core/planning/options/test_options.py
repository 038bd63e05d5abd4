from __future__ import annotations

from itertools import chain, repeat

import attrs
import pytest
from tests.core.planning.conftest import Whole

from shardwright import (
    Block,
    Layout,
    NoPlanError,
    OptimizerSpec,
    ParameterConstraints,
    PlanningError,
    PoolingType,
    ShardingType,
    TableSpec,
    Topology,
    UnknownPluginError,
    UnsupportedError,
    Watch,
)
from shardwright.host import host
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.tables.constraints import Constraints

TABLE = TableSpec("t", 10, 8, ["f"])


def whole(table, topology, rank=None):
    return [Layout([Block(table.all_rows, table.all_columns, rank=rank)])]


def type_of(layouts=whole, **attributes):
    """A sharding type called "made" that is offered always, by the function that makes its layouts."""
    members = {"name": "made", "abbreviation": "MA", "offered": "always", **attributes}
    return type("Made", (ShardingType,), {**members, "layouts": lambda self, *asked: layouts(*asked[:2])})


def options_of(*tables, ranks=2, device="cpu", batch_size=4, **rules):
    rules = {name: ParameterConstraints(**rule) for name, rule in rules.items()}
    topology = Topology(ranks, device)
    return enumerate_options(tables, topology, Constraints(rules), host(), batch_size=batch_size)


def described(options):
    return [
        (
            options.tables[options.table[option]].name,
            options.type_of(option).name,
            options.layouts[option].variant,
            options.kernel_of(option).name,
        )
        for option in range(options.num_options)
    ]


def test_enumerate_offers_types_by_layouts_by_kernels_in_a_fixed_order():
    assert described(options_of(TABLE)) == [
        ("t", "only_pairs", "", "plain"),
        ("t", "only_pairs", "", "thorough"),
        ("t", "slices", "range", "plain"),
        ("t", "slices", "range", "thorough"),
        ("t", "slices", "modulo", "plain"),
        ("t", "slices", "modulo", "thorough"),
        ("t", "whole", "", "plain"),
        ("t", "whole", "", "thorough"),
    ]


def test_enumerate_counts_ids_and_bags_of_all_features():
    table = TableSpec("t", 10, 8, ["a", "b"])
    options = options_of(
        table,
        batch_size=100,
        t={"pooling_factors": [20, 0.5], "num_poolings": [1, 2], "batch_sizes": [100, 10]},
    )
    assert options.ids_per_batch.tolist() == [20 * 1 * 100 + 0.5 * 2 * 10]
    # Of the second feature's bags half are empty.
    assert options.bags_per_batch.tolist() == [1 * 100 + 0.5 * 2 * 10]


def test_enumerate_sequences_return_a_vector_for_each_id():
    table = TableSpec("t", 10, 8, ["a"], pooling=PoolingType.NONE)
    options = options_of(table, batch_size=100, t={"pooling_factors": [20]})
    assert options.bags_per_batch.tolist() == [2000]


def test_enumerate_refused_kernel_is_recorded_and_another_taken():
    options = options_of(TableSpec("t", 10, 8, ["f"], optimizer=OptimizerSpec("adam")))
    assert {kernel for *_, kernel in described(options)} == {"thorough"}
    assert ("plain", "plain knows no adam") in {(r.name, r.reason) for r in options.refusals}


def test_enumerate_without_optimizer_offers_the_kernels_that_show_gradients():
    options = options_of(TableSpec("t", 10, 8, ["f"], optimizer=None))
    assert "visible" in {kernel for *_, kernel in described(options)}


def test_enumerate_aliases_name_the_same_plugins():
    options = options_of(TABLE, t={"sharding_types": ["entire"], "compute_kernels": ["simple"]})
    assert described(options) == [("t", "whole", "", "plain")]


@pytest.mark.parametrize("is_generator", [False, True])
def test_enumerate_type_whose_layouts_raise_unsupported_is_refused_with_its_reason(host_with, is_generator):
    def raised(table, topology):
        raise UnsupportedError(f"no rows of {table.name!r} are known")

    def yielding(table, topology):
        yield from raised(table, topology)

    declines = type_of(yielding if is_generator else raised)
    with host_with(sharding_types=[declines, Whole]):
        options = options_of(TABLE)
        assert {kind for _, kind, *_ in described(options)} == {"whole"}
        assert [r.reason for r in options.refusals if r.name == "made"] == ["no rows of 't' are known"]
        with pytest.raises(PlanningError, match=r"Refused: .*made.*no rows of 't' are known"):
            options_of(TABLE, t={"sharding_types": ["made"]})


def test_enumerate_type_that_declines_without_a_reason_is_refused(host_with):
    def raised(table, topology):
        raise UnsupportedError("")

    with (
        host_with(sharding_types=[type_of(raised)]),
        pytest.raises(PlanningError, match=r"Refused: .*'made'"),
    ):
        options_of(TABLE, t={"sharding_types": ["made"]})


def test_enumerate_type_that_declines_one_of_mixed_devices_is_offered_on_the_other(host_with):
    def on_cpus(table, topology):
        if topology.device_types != ("cpu",):
            raise UnsupportedError("only on CPUs")
        return whole(table, topology)

    with host_with(sharding_types=[type_of(on_cpus)]):
        options = options_of(TABLE, device=["cuda", "cpu"])
    assert ("t", "made", "cpu") in {own[:3] for own in described(options)}
    assert "made" not in {refusal.name for refusal in options.refusals}


def test_enumerate_nothing_left_raises_with_every_reason():
    table = TableSpec("t", 10, 8, ["f"], optimizer=OptimizerSpec("adam"))
    with pytest.raises(PlanningError) as caught:
        options_of(
            table, ranks=3, t={"sharding_types": ["whole", "only_pairs"], "compute_kernels": ["plain"]}
        )
    text = str(caught.value)
    for part in (
        "table 't' (10 x 8 FP32)",
        "sharding_types=['whole', 'only_pairs']",
        "compute_kernels=['plain']",
        "plain knows no adam",
        "needs 2 ranks, there are 3",
        "adam(learning_rate=0.01)",
        "Known sharding types: only_pairs, slices, whole",
        "Loosen what is asked of 't'",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            {"sharding_types": ["wohle"]},
            r"table 't' .*: no sharding type 'wohle'.*Did you mean 'whole'\?",
        ),
        ({"compute_kernels": ["plane"]}, r"no compute kernel 'plane'.*Did you mean 'plain'\?"),
    ],
)
def test_enumerate_unknown_name_raises_with_the_nearest(rule, text):
    with pytest.raises(UnknownPluginError, match=text):
        options_of(TABLE, t=rule)


def test_enumerate_device_group_of_another_device_raises():
    with pytest.raises(
        PlanningError, match="device_group 'cuda', but the topology's compute_device is 'cpu'"
    ):
        options_of(TABLE, t={"device_group": "cuda"})


@pytest.mark.parametrize(("by_shape", "asked"), [(True, ["a", "c"]), (False, ["a", "b", "c"])])
def test_enumerate_asks_a_type_that_answers_by_shape_once_for_tables_alike(host_with, by_shape, asked):
    seen = []
    noting = type_of(
        lambda table, topology: seen.append(table.name) or whole(table, topology),
        depends_on_shape_only=by_shape,
    )
    tables = [TableSpec("a", 10, 8, ["f"]), TableSpec("b", 10, 8, ["g", "h"]), TableSpec("c", 11, 8, ["i"])]
    with host_with(sharding_types=[noting]):
        options = options_of(*tables)
    assert seen == asked
    assert options.num_rows[options.first_shard[options.first_option[options.distinct_table]]].tolist() == [
        10,
        10,
        11,
    ]


@pytest.mark.parametrize(
    ("other", "rules", "by_shape", "alike"),
    [
        ({}, {}, True, [0, 0]),
        ({}, {}, False, [0, 0]),
        ({"num_embeddings": 11}, {}, True, [0, 1]),
        ({"feature_names": ["f", "g"]}, {}, True, [0, 1]),
        ({}, {"u": {"pooling_factors": [2]}}, True, [0, 1]),
        ({}, {"t": {"pooling_factors": [2]}, "u": {"pooling_factors": [2]}}, True, [0, 0]),
    ],
)
def test_enumerate_tables_that_nothing_tells_apart_stand_once(host_with, other, rules, by_shape, alike):
    with host_with(sharding_types=[type_of(depends_on_shape_only=by_shape)]):
        options = options_of(TABLE, attrs.evolve(TABLE, name="u", **other), **rules)
    assert options.distinct_table.tolist() == alike
    assert [table.name for table in options.all_tables] == ["t", "u"]
    assert options.multiplicity.tolist() == [alike.count(index) for index in sorted(set(alike))]
    assert {refusal.table for refusal in options.refusals} == {"t", "u"}


def test_enumerate_tables_that_a_type_tells_apart_stand_apart(host_with):
    """What a type that looks at names answers is compared, whatever else tables have in common."""

    by_name = type_of(lambda table, topology: whole(table, topology, rank=int(table.name == "u")))
    with host_with(sharding_types=[by_name]):
        options = options_of(*(attrs.evolve(TABLE, name=name) for name in "tuv"))
    assert options.distinct_table.tolist() == [0, 1, 0]
    assert options.rank.tolist() == [0, 0, 1, 1]  # each table with two kernels


def raise_for(table, topology):
    raise KeyError("no such shape")


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        (
            lambda table, topology: [*whole(table, topology, rank=0), *whole(table, topology, rank=1)],
            r"'made' failed for table 't' .*gave 2 layouts, of which several have the variant ''; give each",
        ),
        (raise_for, r"sharding type 'made' failed for table 't' .*KeyError"),
        (
            lambda table, topology: whole(table, topology, rank=topology.world_size),
            r"sharding type 'made' broke its contract: .* on rank 2 of 2 ranks",
        ),
    ],
    ids=["one variant twice", "raises", "no such rank"],
)
def test_enumerate_type_that_gives_wrong_layouts_is_named_with_the_table(host_with, layouts, text):
    with host_with(sharding_types=[type_of(layouts)]), pytest.raises(PlanningError, match=text):
        options_of(TABLE)


def test_options_that_end_early_blame_no_sharding_type_that_took_little_of_the_time():
    watch = Watch(seconds=1.0, clock=chain([0.0], repeat(5.0)).__next__)  # late at once
    with pytest.raises(NoPlanError, match=r"after 5\.0 s; the next is 'a'.*\. Allow more time$"):
        enumerate_options(
            [TableSpec("a", 10, 8)], Topology(2, "cpu"), Constraints(), host(), batch_size=4, watch=watch
        )
