"""Configurations and specifications of tables, their optimizers and caches: what is taken, what is refused and how."""

from __future__ import annotations

import enum
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises

from shardwright import (
    CacheParams,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    EmbeddingOffloadStats,
    InvalidInputError,
    OptimizerSpec,
    PoolingType,
    TableSpec,
)
from shardwright.planning.tables.spec import check_tables, embedding_names

CONFIGS = [EmbeddingConfig, EmbeddingBagConfig]


@pytest.mark.parametrize("make", [*CONFIGS, TableSpec])
def test_table_sizes_may_be_integers_of_numpy(make):
    ids = np.array([3, 41])
    table = make(name="items", num_embeddings=ids.max() + 1, embedding_dim=np.uint8(4))
    assert table == make(name="items", num_embeddings=42, embedding_dim=4)
    assert type(table.num_embeddings) is type(table.embedding_dim) is int


@pytest.mark.parametrize("make", [*CONFIGS, TableSpec])
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.OF_A_PLUGIN])
def test_table_data_type_may_be_a_member_or_its_name_in_any_case(make, data_type):
    for given_type in (data_type, data_type.value, data_type.value.lower()):
        assert make(name="t", num_embeddings=1, embedding_dim=1, data_type=given_type).data_type is data_type


def test_bag_config_without_pooling_raises_naming_the_other_collection():
    with pytest.raises(InvalidInputError, match=r"table 'items': .*use an EmbeddingCollection"):
        EmbeddingBagConfig(1, 1, name="items", pooling=PoolingType.NONE)


@pytest.mark.parametrize("names", ["user", ["a", "b", "a"], ["a", 1], {"a"}, 3])
def test_config_wrong_feature_names_raise(names):
    with pytest.raises(InvalidInputError, match="feature_names"):
        EmbeddingBagConfig(1, 1, name="items", feature_names=names)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"init_fn": 3}, "EmbeddingBagConfig 'items': init_fn must be a function or None, got 3"),
        ({"weight_init_min": 1, "weight_init_max": 0}, "weight_init_min is 1.0, above weight_init_max"),
        ({"weight_init_min": 1}, "weight_init_min is 1.0, above weight_init_max, which is 0.5"),
        ({"weight_init_max": math.nan}, "weight_init_max must be a finite number or None, got nan"),
        ({"weight_init_min": -math.inf}, "weight_init_min must be a finite number or None, got -inf"),
    ],
)
def test_config_wrong_initialization_raises(arguments, text):
    with pytest.raises(InvalidInputError, match=re.escape(text)):
        EmbeddingBagConfig(4, 1, name="items", **arguments)


def test_config_initial_weights_default_to_the_root_of_the_rows():
    config = EmbeddingConfig(16, 2)
    assert (config.get_weight_init_min(), config.get_weight_init_max()) == (-0.25, 0.25)
    given_bounds = EmbeddingConfig(16, 2, weight_init_min=-1, weight_init_max=0)
    assert (given_bounds.get_weight_init_min(), given_bounds.get_weight_init_max()) == (-1.0, 0.0)
    assert EmbeddingConfig(3, 2).get_weight_init_max() == math.sqrt(1 / 3)


def test_config_defaults_are_torchrecs():
    config = EmbeddingBagConfig(num_embeddings=3, embedding_dim=2)
    assert (config.name, config.data_type, config.feature_names) == ("", DataType.FP32, [])
    assert (config.pooling, config.num_features()) == (PoolingType.SUM, 0)
    assert EmbeddingConfig(3, 2).pooling is PoolingType.NONE


@pytest.mark.parametrize("make", [*CONFIGS, TableSpec])
def test_feature_names_may_be_keys_of_a_dict_whose_order_is_known(make):
    sizes = {"name": "t", "num_embeddings": 4, "embedding_dim": 4}
    assert list(make(**sizes, feature_names={"b": 1, "a": 2}.keys()).feature_names) == ["b", "a"]


@pytest.mark.parametrize("make", CONFIGS)
def test_table_spec_from_config_has_all_of_it(make):
    config = make(5, 3, name="t", data_type="BF16", feature_names=["b", "a"])
    spec = TableSpec.from_config(config, module="m.n", is_weighted=True, optimizer=OptimizerSpec("adam"))
    assert spec == TableSpec(
        "t",
        5,
        3,
        ("b", "a"),
        "BF16",
        config.pooling,
        is_weighted=True,
        module="m.n",
        optimizer=OptimizerSpec("adam"),
    )
    assert hash(spec) == hash(
        TableSpec.from_config(config, module="m.n", is_weighted=True, optimizer=spec.optimizer)
    )
    assert (spec.path, spec.num_features) == ("m.n.t", 2)
    assert TableSpec("t", 5, 3).path == "t"


@pytest.mark.parametrize("wrong", ["", "FP 32", "torch.float32", 32, None])
def test_what_is_no_name_is_no_data_type(wrong):
    with pytest.raises(InvalidInputError, match="a data type is a name such as 'FP32'"):
        DataType(wrong)


def test_embedding_names_feature_of_one_table_keeps_its_name_and_of_several_gets_the_table():
    assert embedding_names({"t1": ["a", "b"], "t2": ["b", "c"], "t3": ["b"]}) == {
        "t1": ["a", "b@t1"],
        "t2": ["b@t2", "c"],
        "t3": ["b@t3"],
    }


def bag(name, *features):
    return EmbeddingBagConfig(1, 1, name=name, feature_names=list(features))


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ([bag("a", "f"), bag("", "g")], "table 1 has no name"),
        ([bag("a", "f"), bag("a", "g")], "two tables are named 'a'"),
        ([bag("a")], "table 'a' has no feature_names"),
    ],
)
def test_check_tables_that_cannot_stand_together_raise(tables, text):
    with pytest.raises(InvalidInputError, match=text):
        check_tables(tables)


@pytest.mark.parametrize("fused_params", [None, {}])
def test_spec_from_nothing_is_fbgemms_default(fused_params):
    assert OptimizerSpec.from_fused_params(fused_params) == OptimizerSpec("sgd", 0.01, is_assumed=True)


def test_spec_that_is_named_is_not_assumed_even_if_it_is_the_default():
    assert not OptimizerSpec.from_fused_params({"optimizer": "sgd", "learning_rate": 0.01}).is_assumed


@pytest.mark.parametrize("rate", ["lr", "learning_rate"])
def test_spec_from_fused_params_takes_rate_and_the_rest_as_parameters(rate):
    fused_params = {"optimizer": "adam", rate: 0.5, "eps": 1e-3, "beta1": 0.8}
    spec = OptimizerSpec.from_fused_params(fused_params)
    assert spec == OptimizerSpec("adam", 0.5, {"beta1": 0.8, "eps": 1e-3})
    assert spec.parameters == (("beta1", 0.8), ("eps", 1e-3))
    assert (spec.get("eps", None), spec.get("beta2", 0.9)) == (1e-3, 0.9)
    assert str(spec) == "adam(learning_rate=0.5, beta1=0.8, eps=0.001)"
    assert fused_params == {"optimizer": "adam", rate: 0.5, "eps": 1e-3, "beta1": 0.8}


parameters = st.dictionaries(
    st.sampled_from(["eps", "beta1", "momentum", "betas"]),
    st.one_of(st.floats(allow_nan=False), st.lists(st.integers(), max_size=2)),
)


# Hits of 100 lookups once a table of 1000 rows has a cache of up to 250, 500, 750 and 1000 rows.
STATS = EmbeddingOffloadStats(0.2, 500, [60, 20, 15, 5], 1000)


@pytest.mark.parametrize(
    ("load_factor", "missed"), [(0.0, 1.0), (0.001, 0.4), (0.25, 0.4), (0.3, 0.2), (0.6, 0.05), (1.0, 0.0)]
)
def test_miss_rate_is_what_bins_up_to_the_caches_size_do_not_serve(load_factor, missed):
    assert STATS.expected_miss_rate(load_factor) == pytest.approx(missed)


def test_miss_rate_of_a_table_that_is_never_looked_up_is_nothing():
    assert EmbeddingOffloadStats(0, 0, [0, 0], 10).expected_miss_rate(0.0) == 0


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=20),
    st.integers(1, 10**9),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_miss_rate_is_a_part_and_never_rises_with_the_cache(counts, height, one, other):
    stats = EmbeddingOffloadStats(0.5, 1, counts, height)
    small, large = sorted([one, other])
    assert 1 >= stats.expected_miss_rate(small) >= stats.expected_miss_rate(large) >= 0


def test_cache_without_statistics_is_hit_as_often_as_it_is_large():
    assert CacheParams(0.3).miss_rate == pytest.approx(0.7)
    assert CacheParams().held == 0.2
    assert CacheParams(0.3, stats=STATS).miss_rate == pytest.approx(0.2)


class Algorithm(enum.Enum):  # FBGEMM's
    LRU = 0
    LFU = 1


def test_cache_of_fused_params_is_told_from_the_optimizer():
    fused_params = {
        "optimizer": "adam",
        "eps": 1e-8,
        "cache_load_factor": 0.4,
        "cache_algorithm": Algorithm.LFU,
    }
    assert CacheParams.from_fused_params(fused_params) == CacheParams(0.4, "lfu")
    assert OptimizerSpec.from_fused_params(fused_params) == OptimizerSpec("adam", parameters={"eps": 1e-8})
    assert CacheParams.from_fused_params(None) == CacheParams()


@pytest.mark.parametrize(
    "arguments", [{"load_factor": 0}, {"load_factor": 1.5}, {"algorithm": "fifo"}, {"stats": 3}]
)
def test_cache_params_wrong_value_raises(arguments):
    with raises(InvalidInputError, subject=next(iter(arguments))):
        CacheParams(**arguments)
