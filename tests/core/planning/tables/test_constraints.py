from __future__ import annotations

import json
from enum import Enum

import numpy as np
import pytest
from tests.errors import raises, refused

from shardwright import InvalidInputError, ParameterConstraints, TableSpec, UnknownNameError
from shardwright.planning.tables.constraints import Constraints


class Kind(Enum):
    WHOLE = "whole"


def rule(factor: float) -> ParameterConstraints:
    return ParameterConstraints(pooling_factors=[factor])


def factor_of(constraints: Constraints, table: TableSpec) -> float:
    return constraints.of(table).per_feature("pooling_factors", table, 1.0)[0]


@pytest.mark.parametrize(
    ("rules", "path", "factor"),
    [
        ({"user_*": 2, "user_id": 3}, "user_id", 3),
        ({"user_*": 2, "user_id": 3}, "user_age", 2),
        ({"user_a*": 2, "user_*": 3, "*": 4}, "user_age", 2),
        ({"user_a*": 2, "user_*": 3, "*": 4}, "user_id", 3),
        ({"user_a*": 2, "user_*": 3, "*": 4}, "item", 4),
        ({"t": 2, "towers.left.t": 3}, "towers.left.t", 3),
        ({"t": 2, "towers.left.t": 3}, "towers.right.t", 2),
    ],
)
def test_constraints_path_goes_before_name_and_name_before_the_first_pattern(rules, path, factor):
    module, _, name = path.rpartition(".")
    constraints = Constraints({key: rule(own) for key, own in rules.items()})
    assert factor_of(constraints, TableSpec(name, 4, 4, ["f"], module=module)) == factor


def test_constraints_pattern_matches_paths():
    constraints = Constraints({"towers.left.*": rule(2)})
    assert factor_of(constraints, TableSpec("t", 4, 4, ["f"], module="towers.left")) == 2
    assert factor_of(constraints, TableSpec("t", 4, 4, ["f"], module="towers.right")) == 1


@pytest.mark.parametrize(("key", "near"), [("user_idd", "Did you mean 'user_id'"), ("itm_*", "")])
def test_constraints_key_for_no_table_raises_with_the_nearest(key, near):
    tables = [TableSpec("user_id", 4, 4), TableSpec("item", 4, 4)]
    with pytest.raises(UnknownNameError, match=rf"constraints\['{key[:4]}.*Tables: item, user_id\..*{near}"):
        Constraints({key: rule(2)}).check(tables)


def test_parameter_constraints_accept_members_with_a_value():
    assert ParameterConstraints(sharding_types=[Kind.WHOLE]).sharding_types == ("whole",)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sharding_types": "whole"},
        {"compute_kernels": []},
        {"compute_kernels": ["a", ""]},
        {"device_group": ""},
        {"pooling_factors": [-1.0]},
        {"pooling_factors": []},
        {"min_partition": 0},
        {"min_partition": "4"},
        {"sharding_types": 3},
        {"pooling_factors": 3.0},
        {"pooling_factors": "12"},
        {"pooling_factors": ["many"]},
        {"pooling_factors": [True]},
        {"pooling_factors": [float("nan")]},
        {"num_poolings": [float("inf")]},
        {"num_poolings": [0]},
        {"batch_sizes": [8, 0]},
        {"num_poolings": [1e30]},
        {"batch_sizes": [2.7]},
        {"batch_sizes": {8, 9}},
        {"ranks": True},
        {"ranks": []},
        {"ranks": [0, "1"]},
        {"ranks": np.array([0, -1])},
        {"extras": {1: 2}},
    ],
    ids=str,
)
def test_parameter_constraints_wrong_value_raises(arguments):
    with raises(InvalidInputError, subject=next(iter(arguments))):
        ParameterConstraints(**arguments)


def test_parameter_constraints_take_integers_of_numpy():
    given = ParameterConstraints(ranks=np.arange(2), min_partition=np.int32(4), batch_sizes=[np.int64(8)])
    assert given == ParameterConstraints(ranks=[0, 1], min_partition=4, batch_sizes=[8])
    assert ParameterConstraints(ranks=np.int64(1)) == ParameterConstraints(ranks=1)
    assert json.loads(json.dumps(given.to_data())) == {
        "min_partition": 4,
        "batch_sizes": [8],
        "ranks": [0, 1],
    }


def test_per_feature_one_value_stands_for_all_features():
    table = TableSpec("t", 4, 4, ["a", "b", "c"])
    assert ParameterConstraints(pooling_factors=[2]).per_feature("pooling_factors", table, 1.0) == (2, 2, 2)


REFUSED = [
    pytest.param(
        lambda: Constraints({"t": {"sharding_types": ["whole"]}}),
        InvalidInputError,
        "must be a ParameterConstraints",
        id="constraints value of another type raises",
    ),
    pytest.param(
        lambda: ParameterConstraints(batch_sizes=["4"]),
        InvalidInputError,
        r"batch_sizes\[0\] must be .*, got '4'",
        id="batch sizes of texts are refused as numbers are",
    ),
    pytest.param(
        lambda: ParameterConstraints(enforce_hbm=True),
        TypeError,
        "enforce_hbm",
        id="parameter constraints has no option that would be ignored",
    ),
    pytest.param(
        lambda: ParameterConstraints(pooling_factors=[2, 3]).per_feature(
            "pooling_factors", TableSpec("t", 4, 4, ["a", "b", "c"]), 1.0
        ),
        InvalidInputError,
        "pooling_factors has 2 values, the table has 3 features",
        id="per feature another number of values raises with both",
    ),
]


test_wrong_call_is_an_error_that_says_what_is_wrong = refused(REFUSED)
