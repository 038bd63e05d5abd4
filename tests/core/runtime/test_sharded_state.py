"""State, parameters and text of sharded bags."""

from __future__ import annotations

import pytest
import torch
from tests.core.runtime.mixed_cuts import case_of, simulate

from shardwright.optim import _keyed_state


def test_state_dict_gives_whole_tables_whatever_is_asked_of_it():
    case = case_of()
    expected = case.module().state_dict()

    def work(sharded, batch, env):
        return _keyed_state.full(sharded.state_dict(keep_vars=True)), sharded.state_dict(prefix="model.bags.")

    for state, prefixed in simulate(case, work):
        assert list(state) == list(expected)
        assert list(prefixed) == [f"model.bags.{name}" for name in expected]
        assert all(torch.equal(state[name], weight) for name, weight in expected.items())
        assert not any(value.requires_grad for value in state.values())


def key(table, name="weight"):
    return f"embedding_bags.{table}.{name}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop(key("t1")), f'Missing key(s) in state_dict: "{key("t1")}"'),
        (
            lambda state: state.update({key("t1", "bias"): 0}),
            f'Unexpected key(s) in state_dict: "{key("t1", "bias")}"',
        ),
        (lambda state: state.update({key("t9"): 0}), f'Unexpected key(s) in state_dict: "{key("t9")}"'),
        (
            lambda state: state.update({key("t1"): torch.zeros(9, 5)}),
            f"table 't1' (9 x 6 FP32): '{key('t1')}' is torch.float32 [9, 5], not torch.float32 [9, 6]",
        ),
    ],
    ids=["missing", "unexpected in a table", "unexpected table", "another shape"],
)
def test_load_state_dict_that_does_not_fit_raises_what_torch_raises(change, text):
    case = case_of()
    state = case.module().state_dict()
    change(state)

    def work(sharded, batch, env):
        with pytest.raises(RuntimeError) as error:
            sharded.load_state_dict(state)
        return str(error.value)

    for told in simulate(case, work):
        assert text in told


def test_load_state_dict_not_strict_loads_what_is_there():
    case = case_of()
    state = {name: torch.full_like(weight, 2.0) for name, weight in case.module().state_dict().items()}
    del state["embedding_bags.t1.weight"]
    state["other"] = torch.zeros(1)

    def work(sharded, batch, env):
        return sharded.load_state_dict(state, strict=False), sharded.full_state_dict()

    for keys, loaded in simulate(case, work):
        assert (keys.missing_keys, keys.unexpected_keys) == (["embedding_bags.t1.weight"], ["other"])
        assert (loaded["embedding_bags.t0.weight"] == 2).all()
        assert torch.equal(
            loaded["embedding_bags.t1.weight"], case.module().state_dict()["embedding_bags.t1.weight"]
        )


def test_parameters_are_the_local_blocks_and_marked_as_updated_in_backward():
    def work(sharded, batch, env):
        return {name: tuple(p.shape) for name, p in sharded.named_parameters() if p._in_backward_optimizers}

    assert simulate(case_of(), work) == [
        {
            "embedding_bags.t0.weight": (6, 4),
            "embedding_bags.t1.weight": (9, 2),
            "embedding_bags.t2.weight": (3, 1),
            "embedding_bags.t2.weight_1": (2, 2),
        },
        {
            "embedding_bags.t0.weight": (5, 4),
            "embedding_bags.t1.weight": (9, 2),
            "embedding_bags.t1.weight_1": (9, 2),
            "embedding_bags.t2.weight": (3, 2),
            "embedding_bags.t2.weight_1": (2, 1),
            "embedding_bags.t2.weight_2": (2, 1),
            "embedding_bags.t2.weight_3": (2, 2),
        },
    ]


def test_print_shows_input_dists_lookups_and_output_dists():
    text = simulate(case_of(), lambda sharded, batch, env: str(sharded))[1]
    assert "(t2): ShardedTable(7 x 3, cut, loop, here: 3 x 2, 2 x 1, 2 x 1, 2 x 2)" in text
    for part in (
        "(_input_dists)",
        "(_lookups)",
        "(_output_dists)",
        "rank 0:",
        "loop_by_sample, sgd(learning_rate=0.5)",
    ):
        assert part in text
