from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright import (
    CacheParams,
    InvalidInputError,
    OptimizerSpec,
    ParameterConstraints,
    TableSpec,
    Workload,
)
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.workload import table_from_data, table_to_data


def workload(*tables, **more):
    return Workload.from_data(
        {"tables": [{"num_embeddings": 10, "embedding_dim": 4, **t} for t in tables], **more}
    )


def test_workload_what_the_user_asks_goes_before_what_the_file_says():
    made = workload({"name": "a", "pooling_factor": 3.0}, {"name": "b", "pooling_factor": 2.0})
    asked = Constraints(
        {"a": ParameterConstraints(pooling_factors=[9]), "*": ParameterConstraints(sharding_types=["x"])}
    )
    together = made.constrained(asked)
    rules = {table.name: together.of(table) for table in made.tables}
    assert (rules["a"].pooling_factors, rules["b"].pooling_factors) == ((9.0,), (2.0,))
    assert rules["a"].sharding_types == rules["b"].sharding_types == ("x",)


def test_workload_says_when_tables_are_updated_and_which_gradients_are_clipped():
    made = workload({"name": "a", "update": "in_step", "max_gradient": 0.5}, {"name": "b"})
    assert [(table.update, table.max_gradient) for table in made.tables] == [
        ("in_step", 0.5),
        ("in_backward", None),
    ]
    for table in made.tables:
        assert table_from_data(table_to_data(table), "it") == table


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            {"name": "a", "update": "in_stpe"},
            r"table 0 \('a'\): .*update must be 'in_backward' or 'in_step', got 'in_stpe'",
        ),
        ({"name": "a", "max_gradient": 0}, "max_gradient must be above 0, got 0"),
        ({"name": 3}, "table 0: name must be a text, got 3"),
        ({"name": ""}, r"table 0 \(''\): name must have 1 character at least, got ''"),
        ({"name": "a", "poling": "MEAN"}, r"table 0 \('a'\) has the key 'poling'.*Did you mean 'pooling'\?"),
        ({"name": "a", "feature_names": "f"}, "feature_names must be a list, got 'f'"),
        (
            {"name": "a", "feature_names": ["f"], "num_features": 2},
            "num_features is 2, and feature_names has 1",
        ),
        ({"name": "a", "is_weighted": "no"}, r"table 0 \('a'\): is_weighted must be true or false, got 'no'"),
        (
            {"name": "a", "num_embeddings": 1 << 70},
            "num_embeddings must be 9223372036854775807 at most, got 118",
        ),
        ({"name": "a", "num_features": -1}, "num_features must be 0 at least, got -1"),
        (
            {"name": "a", "pooling_factors": "many"},
            r"table 0 \('a'\): pooling_factors must be a list, got 'many'",
        ),
        ({"name": "a", "data_type": "F 7"}, r"table 0 \('a'\): .*data_type.* a data type is a name"),
        ({"name": "a", "optimizer": 3}, "optimizer must be null or an object or a text, got 3"),
    ],
)
def test_workload_entry_of_the_wrong_form_raises_naming_it(entry, text):
    with pytest.raises(InvalidInputError, match=text):
        workload(entry)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"batch_size": 77}, r"the workload has the key 'batch_size'.*Did you mean 'batch_size_per_rank'\?"),
        ({"rows_per_day": 3}, r"has the key 'rows_per_day', which is not read.*begin with 'x-'\."),
        ({"batch_size_per_rank": 1 << 40}, "batch_size_per_rank must be 2147483647 at most"),
    ],
)
def test_workload_key_that_is_not_read_raises_with_the_nearest(more, text):
    with pytest.raises(InvalidInputError, match=text):
        workload({"name": "a"}, **more)


def test_workload_comments_and_keys_of_others_are_left_alone():
    made = workload(
        {"name": "a", "source": "measured", "x-rows_per_day": 3}, notes=["n"], **{"x-mine": {"any": [1]}}
    )
    assert made.tables[0].name == "a"


SPECS = st.builds(
    TableSpec,
    name=st.text(min_size=1, max_size=5),
    num_embeddings=st.integers(1, 10**12),
    embedding_dim=st.integers(1, 4096),
    feature_names=st.lists(st.text(max_size=4), max_size=3, unique=True),
    data_type=st.sampled_from(["FP32", "FP16", "INT8"]),
    pooling=st.sampled_from(["SUM", "MEAN", "NONE"]),
    is_weighted=st.booleans(),
    module=st.sampled_from(["", "tower", "a.b"]),
    optimizer=st.none()
    | st.builds(
        OptimizerSpec,
        name=st.sampled_from(["sgd", "adam", "mine"]),
        learning_rate=st.floats(0, 10),
        parameters=st.just({"eps": 1e-8, "beta1": 0.9, "beta2": 0.99}) | st.just({}),
    ),
    qcomms_config=st.none() | st.just({"forward_precision": "fp16"}),
    cache=st.just(CacheParams()) | st.just(CacheParams(load_factor=0.5, algorithm="lfu")),
)


@given(SPECS)
def test_table_through_json_is_the_same(table):
    assert table_from_data(json.loads(json.dumps(table_to_data(table))), "table") == table


RULES = st.builds(
    ParameterConstraints,
    sharding_types=st.none() | st.lists(st.sampled_from("xyz"), min_size=1),
    compute_kernels=st.none() | st.lists(st.sampled_from("kl"), min_size=1),
    min_partition=st.none() | st.integers(1, 100),
    pooling_factors=st.none() | st.lists(st.floats(0, 100), min_size=1, max_size=3),
    ranks=st.none() | st.lists(st.integers(0, 9), min_size=1),
    together=st.none() | st.sampled_from("ab"),
    apart=st.none() | st.lists(st.sampled_from("cd"), min_size=1),
    is_weighted=st.none() | st.booleans(),
)


@given(st.dictionaries(st.sampled_from(["a", "b*", "*"]), RULES))
def test_constraints_through_json_are_the_same(rules):
    constraints = Constraints(rules)
    assert Constraints.from_data(json.loads(json.dumps(constraints.to_data()))) == constraints


def test_constraints_are_put_together_field_by_field():
    constraints = Constraints(
        {
            "*": ParameterConstraints(pooling_factors=[9], ranks=0, min_partition=8),
            "user_id": ParameterConstraints(sharding_types=["x"]),
            "user_*": ParameterConstraints(pooling_factors=[2], sharding_types=["y"]),
        }
    )
    rule = constraints.of(TableSpec("user_id", 4, 4))
    assert (rule.sharding_types, rule.pooling_factors) == (("x",), (9.0,))  # "*" stands before "user_*"
    assert (rule.ranks, rule.min_partition) == ((0,), 8)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ([], InvalidInputError, "the file of constraints must be an object"),
        ({"a": 3}, InvalidInputError, r"constraints\['a'\] must be an object, got 3"),
        (
            {"a": {"rank": 1}},
            InvalidInputError,
            r"constraints\['a'\] has the key 'rank', which is not read.*Did you mean 'ranks'",
        ),
        ({"a": {"ranks": []}}, InvalidInputError, r"constraints\['a'\]: ranks must have 1 item at least"),
        ({"a": {"ranks": [-1]}}, InvalidInputError, r"ranks\[0\] must be 0 at least, got -1"),
        ({"a": {"together": ["x"]}}, InvalidInputError, "together must be a text"),
        ({"a": {"device_group": 3}}, InvalidInputError, "device_group must be a text, got 3"),
        ({"a": {"is_weighted": "no"}}, InvalidInputError, "is_weighted must be true or false, got 'no'"),
    ],
)
def test_constraints_of_the_wrong_form_raise_naming_them(data, error, text):
    with pytest.raises(error, match=text):
        Constraints.from_data(data)
