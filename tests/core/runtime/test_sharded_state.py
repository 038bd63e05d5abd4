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
