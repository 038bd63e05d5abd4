"""Sharded equals unsharded for layouts of any shape, and for unusual ways to call a module."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.runtime.plans import (
    RATE,
    Cut,
    Cuts,
    RowsMirrored,
    cuts,
    host_with_loops,
    train_step,
    train_unsharded,
)

from shardwright.errors import DistributedError, InvalidInputError, UnsupportedError
from shardwright.planning.layouts import Exchange, Hierarchical, Replicate
from shardwright.planning.row_maps import RowsModulo, RowsRange
from shardwright.plugins import use_host
from shardwright.runtime.inputs import Status
from shardwright.sparse import KeyedJaggedTensor
from shardwright.testing.simulated import run_simulated

MIXED = (
    Cut(11, 4, ("a",), "SUM", RowsRange(11, parts=2), (), (0, 1)),
    Cut(9, 6, ("b", "a"), "MEAN", None, (2, 4), (1, 0), "loop_by_sample"),
    Cut(7, 3, ("b",), "MEAN", RowsMirrored(7, 3), (1,), (0, 1, 1)),
)


def case_of(**options):
    return Cuts(MIXED, 2, **options)


def simulate(case, work, *, timeout_s=20.0):
    """Call `work(sharded, batch, env)` on each rank; the batch is the rank's first."""
    module = case.module()
    return run_simulated(
        lambda env: work(case.shard(env, module), case.batch(2 + env.rank, seed=env.rank), env),
        case.world_size,
        timeout_s=timeout_s,
    )


def unsharded(case):
    """The unsharded output for each rank's first batch."""
    return [
        case.module()(case.batch(2 + rank, seed=rank)).values().detach() for rank in range(case.world_size)
    ]


@settings(max_examples=60, deadline=None)
@given(cuts(with_copies=True), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_any_cut_equals_unsharded_after_two_steps(case, batch_sizes):
    def train(env):
        sharded = case.shard(env, module)
        outputs = []
        for step in range(2):
            values = sharded(case.batch(batch_sizes[env.rank], seed=10 * step + env.rank)).values()
            outputs.append(values.detach())
            (values * torch.arange(values.shape[1])).sum().backward()
        return outputs, sharded.state_dict()

    module = case.module()
    with use_host(host_with_loops()):
        results = run_simulated(train, case.world_size)
    reference = case.module()
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(case.world_size):
            values = reference(case.batch(batch_sizes[rank], seed=10 * step + rank)).values()
            torch.testing.assert_close(results[rank][0][step], values.detach(), rtol=1e-4, atol=1e-4)
            ((values * torch.arange(values.shape[1])).sum() / case.world_size).backward()
        optimizer.step()
    for _, state in results:
        for name, weight in reference.state_dict().items():
            torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "NONE"])
@pytest.mark.parametrize("flow", [Exchange(), Hierarchical()], ids=lambda flow: type(flow).__name__)
def test_rows_copied_beside_rows_sent_by_any_dataflow_equal_unsharded(flow, pooling):
    hot_and_cold = Cut(
        11,
        4,
        ("a", "b"),
        pooling,
        RowsRange(11, parts=3),
        (),
        (0, 1),
        "loop",
        flow,
        copied=(1,),
        num_copies=2,
    )
    case = Cuts([hot_and_cold, Cut(7, 4, ("b",), pooling, ranks=(1,))], 2)
    batches = [[case.batch(3 + rank, seed=10 * step + rank) for rank in range(2)] for step in range(3)]
    module = case.module()

    def train(env):
        sharded = case.shard(env, module)
        for step, by_rank in enumerate(batches):
            train_step(case, sharded, by_rank[env.rank], step, env.rank)
        return sharded.state_dict()

    expected = train_unsharded(case, batches)
    for state in run_simulated(train, 2):
        for name, weight in expected.items():
            torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-4)


def strided(tensor):
    return torch.stack([tensor, torch.zeros_like(tensor)], 1)[:, 0]


def with_parts(batch, **changes):
    parts = {
        "keys": batch.keys(),
        "values": batch.values(),
        "lengths": batch.lengths(),
        "weights": batch.weights_or_none(),
        **changes,
    }
    return KeyedJaggedTensor(**parts)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: with_parts(batch, values=strided(batch.values())),
        lambda batch: with_parts(batch, lengths=strided(batch.lengths())),
        lambda batch: with_parts(batch, weights=strided(batch.weights())),
        lambda batch: with_parts(batch, weights=batch.weights().double()),
        lambda batch: with_parts(batch, values=batch.values().int(), lengths=batch.lengths().long()),
        lambda batch: batch.permute([1, 0]),
        lambda batch: batch.permute([1, 0, 1, 0][:2]),
        lambda batch: KeyedJaggedTensor.concat(
            [
                KeyedJaggedTensor(
                    keys=["before"],
                    values=torch.full((batch.stride(),), 10**12),
                    lengths=torch.ones(batch.stride(), dtype=torch.int32),
                    weights=torch.ones(batch.stride()),
                ),
                batch,
            ]
        ),
    ],
    ids=[
        "strided ids",
        "strided lengths",
        "strided weights",
        "float64 weights",
        "int32 ids",
        "another order",
        "copies",
        "a feature nobody asks for",
    ],
)
def test_batch_in_another_form_gives_the_same_output(change):
    case = case_of(is_weighted=True)
    outputs = simulate(case, lambda sharded, batch, env: sharded(change(batch)).values().detach())
    for output, expected in zip(outputs, unsharded(case), strict=True):
        torch.testing.assert_close(output, expected)


def test_weights_are_ignored_where_the_collection_is_not_weighted():
    case = case_of()
    outputs = simulate(
        case,
        lambda sharded, batch, env: sharded(
            with_parts(batch, weights=torch.rand(batch.values().numel()))
        ).values(),
    )
    for output, expected in zip(outputs, unsharded(case), strict=True):
        torch.testing.assert_close(output.detach(), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_output_without_gradients_is_the_same_and_training_goes_on(mode):
    case = case_of()

    def work(sharded, batch, env):
        with mode():
            output = sharded(batch).values()
            again = sharded(batch).values()
        assert not output.requires_grad
        sharded(batch).values().sum().backward()
        return output.clone(), again.clone(), sharded(batch).values().detach()

    for (output, again, trained), expected in zip(simulate(case, work), unsharded(case), strict=True):
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(again, expected)
        assert not torch.allclose(trained, expected)


def sharded_weights(work, case=None):
    def run(sharded, batch, env):
        work(sharded, batch, env)
        return sharded.state_dict()

    return simulate(case or case_of(), run)[0]


def unsharded_weights(loss_of, case=None):
    """Weights after one step of SGD on the mean of `loss_of(module, batch, rank)`."""
    case = case or case_of()
    module = case.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for rank in range(case.world_size):
        (loss_of(module, case.batch(2 + rank, seed=rank), rank) / case.world_size).backward()
    optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda module, batch, rank: module(batch).values().sum(),
        lambda module, batch, rank: module(batch)["a@t0"].sum(),
        lambda module, batch, rank: module(batch).values()[:1].square().sum(),
        lambda module, batch, rank: module(batch).values().sum() + 3 * module(batch).values().sum(),
        lambda module, batch, rank: module(batch).values().sum() * (0 if rank else 1),
        lambda module, batch, rank: module(batch).values().to(torch.float64).sum().exp().log(),
        lambda module, batch, rank: sum(part.sum() for part in module(batch).to_dict().values()),
    ],
    ids=["all", "one output", "one sample", "two forwards", "nothing on rank 1", "another dtype", "by key"],
)
def test_loss_of_any_form_makes_the_unsharded_step(loss_of):
    case = Cuts([*MIXED[:2], Cut(7, 4, ("b",), "SUM", RowsModulo(7, parts=2), (), (1, 0))], 2)
    actual = sharded_weights(lambda sharded, batch, env: loss_of(sharded, batch, env.rank).backward(), case)
    for name, weight in unsharded_weights(loss_of, case).items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-4, atol=1e-5)


def test_output_begun_without_gradients_has_none_wherever_it_is_waited_for():
    def work(sharded, batch, env):
        with torch.no_grad():
            output = sharded(batch)
        return output.values()

    case = case_of()
    for output, expected in zip(simulate(case, work), unsharded(case), strict=True):
        assert not output.requires_grad
        torch.testing.assert_close(output, expected)


def test_second_backward_of_one_graph_raises_and_changes_nothing():
    def work(sharded, batch, env):
        loss = sharded(batch).values().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

    actual = sharded_weights(work)
    for name, weight in unsharded_weights(lambda module, batch, rank: module(batch).values().sum()).items():
        torch.testing.assert_close(actual[name], weight)


def test_retained_graph_makes_an_update_for_each_backward():
    def work(sharded, batch, env):
        loss = sharded(batch).values().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    actual = sharded_weights(work)
    expected = unsharded_weights(lambda module, batch, rank: 2 * module(batch).values().sum())
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight)


@pytest.mark.parametrize(
    "flow", [Exchange(), Hierarchical(), Replicate()], ids=lambda flow: type(flow).__name__
)
def test_step_that_was_waited_for_keeps_no_results(flow):
    def work(sharded, batch, env):
        step = sharded.compute(sharded.input_dist(batch))
        before = float_elements(step)
        output = sharded.output_dist(step).values()
        return before, float_elements(step), output.numel()

    case = Cuts([Cut(9, 4, ("a",), ranks=(0, 1), dataflow=flow), Cut(7, 4, ("b",), "SUM")], 2)
    for before, after, size in simulate(case, work):
        assert before >= size
        assert after == 0


def float_elements(step):
    """How many float32 values a step of the engine holds on to, kernels' own notes left out."""
    seen, found = set(), []

    def visit(thing):
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing.numel() if thing.dtype is torch.float32 else 0)
        elif isinstance(thing, list | tuple):
            for item in thing:
                visit(item)
        elif type(thing).__name__.endswith(("Step", "Trip", "Transfer")):
            names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
            for name in [*names, *getattr(thing, "__dict__", ())]:
                if name not in ("__weakref__", "_saved") and hasattr(thing, name):
                    visit(getattr(thing, name))

    visit(step)
    return sum(found)


def test_hyperparameter_changed_on_one_rank_raises_there_and_is_told_to_the_others():
    def work(sharded, batch, env):
        if env.rank == 1:
            sharded.fused_optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(UnsupportedError if env.rank == 1 else DistributedError) as caught:
            sharded(batch)
        return str(caught.value)

    other, own = simulate(case_of(), work, timeout_s=5.0)
    assert "weight_decay was changed" in own
    assert "rank 1" in other


def test_plan_that_leaves_a_table_out_on_one_rank_is_told_on_both():
    case = case_of()
    module = case.module()

    def shard(env):
        plan = case.shardings()
        if env.rank == 1:
            del plan["t1"]
        with pytest.raises(DistributedError, match="rank 1 differs from rank 0 in 1 tables, 't1' first"):
            case.sharder.shard(module, plan, env, "cpu")

    run_simulated(shard, case.world_size, timeout_s=5.0)


def test_eval_trains_as_the_unsharded_module_does():
    actual = sharded_weights(lambda sharded, batch, env: sharded.eval()(batch).values().sum().backward())
    for name, weight in unsharded_weights(lambda module, batch, rank: module(batch).values().sum()).items():
        torch.testing.assert_close(actual[name], weight)


def test_output_that_nobody_waits_for_leaves_the_next_step_as_it_is():
    def work(sharded, batch, env):
        ignored = sharded(batch)
        if env.rank == 0:
            ignored.values()
        sharded(batch).values().sum().backward()

    actual = sharded_weights(work)
    for name, weight in unsharded_weights(lambda module, batch, rank: module(batch).values().sum()).items():
        torch.testing.assert_close(actual[name], weight)


def test_backward_on_one_rank_only_is_an_error_there_not_a_hang():
    def work(sharded, batch, env):
        loss = sharded(batch).values().sum()
        if env.rank == 0:
            loss.backward()

    with pytest.raises(DistributedError, match="did not come to this collective"):
        simulate(case_of(), work, timeout_s=0.5)


def test_input_dist_of_the_next_batch_may_begin_before_this_ones_lookup():
    def work(sharded, batch, env):
        steps = [sharded.input_dist(batch), sharded.input_dist(batch.permute([1, 0]))]
        outputs = [sharded.output_dist(sharded.compute(step)) for step in steps]
        return [output.values().detach() for output in reversed(outputs)]

    case = case_of()
    for outputs, expected in zip(simulate(case, work), unsharded(case), strict=True):
        for output in outputs:
            torch.testing.assert_close(output, expected)


def test_moves_and_casts_of_the_model_leave_blocks_where_the_plan_put_them():
    case = case_of()

    def work(sharded, batch, env):
        sharded.half().to(torch.float64).to("cpu").float()
        return sharded(batch).values().detach(), {p.dtype for p in sharded.parameters()}

    for (output, dtypes), expected in zip(simulate(case, work), unsharded(case), strict=True):
        torch.testing.assert_close(output, expected)
        assert dtypes == {torch.float32}


def test_something_that_is_no_batch_is_the_same_error_on_all_ranks():
    def work(sharded, batch, env):
        with pytest.raises(InvalidInputError) as error:
            sharded(batch if env.rank == 0 else torch.ones(3))
        return str(error.value), sharded(batch).values().shape  # the next step works

    text = "rank 1: a sharded collection takes a KeyedJaggedTensor, got Tensor"
    assert simulate(case_of(), work) == [(text, (2, 19)), (text, (3, 19))]


def test_problems_of_several_ranks_are_all_told():
    def work(sharded, batch, env):
        values = batch.values().clone()
        values[:] = 2**62 if env.rank else -1
        with pytest.raises(InvalidInputError) as error:
            sharded(with_parts(batch, values=values))
        return str(error.value)

    texts = simulate(Cuts(MIXED, 2), work)
    assert texts[0] == texts[1]
    assert "rank 0: feature 'a' of table 't1' (9 x 6 FP32) has the id -1 at position 0" in texts[0]
    assert "rank 1: feature 'a' of table 't1' (9 x 6 FP32) has the id 4611686018427387904" in texts[0]


def test_header_of_a_bad_batch_says_so_and_only_then_the_ranks_exchange_texts():
    def work(sharded, batch, env):
        headers = []
        exchange = env.communicator.all_to_all

        def recorded(output, input, *splits, label):
            headers.append((label, input.view(env.world_size, -1)[:, 2:].tolist()))
            return exchange(output, input, *splits, label=label)

        env.communicator.all_to_all = recorded
        labels = len(env.communicator.labels)
        values = batch.values().clone()
        values[2] = -(2**62)
        with pytest.raises(InvalidInputError):
            sharded(with_parts(batch, values=values) if env.rank else batch)
        return headers, env.communicator.labels[labels:]

    case = Cuts([Cut(4, 2, ("a",)), Cut(4, 2, ("b",), ranks=(1,))], 2)
    seen = simulate(case, work)
    assert [labels for _, labels in seen] == [["headers", "object"]] * 2
    (_, good), (_, bad) = (own for (own,), _ in seen)
    nothing_extra = good[0][2]
    counts = [case.batch(2, seed=0)[name].values().numel() for name in "ab"]
    # Batch size, status, what is not looked at (nothing, or not compared), and the ids of each rank's only slot.
    assert good == [[2, Status.FINE, nothing_extra, count] for count in counts]
    assert bad == [[0, Status.BAD_INPUT, 0, 0]] * 2


def test_missing_weights_are_told_by_feature_and_table():
    def work(sharded, batch, env):
        with pytest.raises(InvalidInputError) as error:
            sharded(with_parts(batch, weights=None) if env.rank else batch)
        return str(error.value)

    for text in simulate(case_of(is_weighted=True), work):
        assert text.startswith("rank 1: feature 'a' of table 't1' (9 x 6 FP32): the collection is weighted")


def test_weights_that_require_gradients_are_refused_on_all_ranks():
    def work(sharded, batch, env):
        with pytest.raises(InvalidInputError) as error:
            sharded(with_parts(batch, weights=batch.weights().requires_grad_()) if env.rank else batch)
        return str(error.value)

    for text in simulate(case_of(is_weighted=True), work):
        assert text.startswith(
            "rank 1: feature 'a' of table 't1' (9 x 6 FP32): the weights of ids require gradients"
        )


def test_state_dict_whole_tables_whatever_is_asked_of_it():
    case = case_of()
    expected = case.module().state_dict()

    def work(sharded, batch, env):
        return sharded.state_dict(keep_vars=True), sharded.state_dict(prefix="model.bags.")

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
            f"table 't1' (9 x 6 FP32): '{key('t1')}' has shape [9, 5], not [9, 6]",
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
        return sharded.load_state_dict(state, strict=False), sharded.state_dict()

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
