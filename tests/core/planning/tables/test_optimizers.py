"""`OptimizerSpec`: names, values, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises

from shardwright import InvalidInputError, OptimizerSpec


@pytest.mark.parametrize(("optimizer", "name"), [("ADAM", "adam"), ("acme_shampoo", "acme_shampoo")])
def test_spec_from_fused_params_takes_any_name(optimizer, name):
    assert OptimizerSpec.from_fused_params({"optimizer": optimizer}).name == name


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


def test_spec_optimizer_that_is_no_name_raises():
    with raises(InvalidInputError, subject="name"):
        OptimizerSpec.from_fused_params({"optimizer": 3})


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "fast", None])
def test_spec_wrong_learning_rate_raises_with_it(rate):
    with raises(InvalidInputError, subject="learning_rate"):
        OptimizerSpec.from_fused_params({"learning_rate": rate})


parameters = st.dictionaries(
    st.sampled_from(["eps", "beta1", "momentum", "betas"]),
    st.one_of(st.floats(allow_nan=False), st.lists(st.integers(), max_size=2)),
)


@given(parameters, st.randoms(use_true_random=False))
def test_spec_equality_and_hash_do_not_depend_on_the_order_of_parameters(values, random):
    items = list(values.items())
    random.shuffle(items)
    one, other = OptimizerSpec("own", 0.1, values), OptimizerSpec("own", 0.1, dict(items))
    assert one == other
    assert hash(one) == hash(other)
