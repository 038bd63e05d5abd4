"""Sharded equals unsharded for layouts of any shape, and for unusual ways to call a module."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import strategies as st
from tests.core.runtime.mixed_cuts import (
    MIXED,
    case_of,
    sharded_weights,
    simulate,
    unsharded,
    unsharded_weights,
    with_parts,
)
from tests.core.runtime.plans import (
    RATE,
    Cut,
    Cuts,
    cuts,
    host_with_loops,
    train_step,
    train_unsharded,
)
from tests.drawn import drawn

from shardwright import DistributedError, Exchange, KeyedJaggedTensor, RowsModulo, RowsRange, UnsupportedError
from shardwright.host import use_host
from shardwright_plugins.dataflows import Hierarchical, Replicate
from shardwright_testing import run_simulated


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


@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "NONE"])
@pytest.mark.parametrize("edges", [(), (1, 3)], ids=["rows", "columns"])
@pytest.mark.parametrize("flow", [Exchange(), Hierarchical()], ids=lambda flow: type(flow).__name__)
def test_rows_copied_beside_rows_sent_by_any_dataflow_equal_unsharded(flow, edges, pooling):
    hot_and_cold = Cut(
        11,
        4,
        ("a", "b"),
        pooling,
        RowsRange(11, parts=3),
        edges,
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
        return sharded.full_state_dict()

    expected = train_unsharded(case, batches)
    for state in run_simulated(train, 2):
        for name, weight in expected.items():
            torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-4)


def strided(tensor):
    return torch.stack([tensor, torch.zeros_like(tensor)], 1)[:, 0]


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


def test_hyperparameter_changed_on_one_rank_raises_there_and_is_told_to_the_others():
    def work(sharded, batch, env):
        if env.rank == 1:
            sharded.fused_optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(UnsupportedError if env.rank == 1 else DistributedError) as caught:
            sharded(batch)
        return str(caught.value)

    other, own = simulate(case_of(), work)
    assert "weight_decay was changed" in own
    assert "rank 1" in other


def test_plan_that_leaves_a_table_out_on_one_rank_is_told_on_both():
    case = case_of()
    module = case.module()

    def shard(env):
        plan = case.shardings()
        if env.rank == 1:
            del plan["t1"]
        with pytest.raises(
            DistributedError, match=r"'t1' is rank 0: .*; rank 1: 't1' .9 x 6 FP32., .*, not planned"
        ):
            case.sharder.shard(module, plan, env, "cpu")

    run_simulated(shard, case.world_size)


def ignoring_an_output(sharded, batch, env):
    ignored = sharded(batch)
    if env.rank == 0:
        ignored.values()
    sharded(batch).values().sum().backward()


def going_back_twice(sharded, batch, env):
    loss = sharded(batch).values().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize(
    "step",
    [
        lambda sharded, batch, env: sharded.eval()(batch).values().sum().backward(),
        ignoring_an_output,
        going_back_twice,
    ],
    ids=["in evaluation mode", "an output nobody waits for", "a second backward pass, which raises"],
)
def test_odd_step_trains_as_the_unsharded_module_does(step):
    actual = sharded_weights(step)
    for name, weight in unsharded_weights(lambda module, batch, rank: module(batch).values().sum()).items():
        torch.testing.assert_close(actual[name], weight)


def test_backward_on_one_rank_only_is_an_error_there_not_a_hang():
    def work(sharded, batch, env):
        loss = sharded(batch).values().sum()
        if env.rank == 0:
            loss.backward()

    with pytest.raises(DistributedError, match="did not come to this collective"):
        simulate(case_of(), work, timeout_s=0.5)


@pytest.mark.parametrize(
    ("cast", "told"),
    [
        (lambda module: module.to("cpu").float(), nullcontext()),  # a warning would be an error
        (
            lambda module: module.half(),
            pytest.warns(UserWarning, match=r"keep the data type.* torch\.float16"),
        ),
        (lambda module: module.to("cpu", torch.float64), pytest.warns(UserWarning, match=r"torch\.float64")),
    ],
    ids=["float32", "half", "to"],
)
def test_moves_and_casts_of_the_model_leave_blocks_where_the_plan_put_them(cast, told):
    case = case_of()

    def work(sharded, batch, env):
        cast(sharded)
        return sharded(batch).values().detach(), {p.dtype for p in sharded.parameters()}

    with told:
        found = simulate(case, work)
    for (output, dtypes), expected in zip(found, unsharded(case), strict=True):
        torch.testing.assert_close(output, expected)
        assert dtypes == {torch.float32}


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


def test_weights_of_one_ranks_ids_are_trained():
    """What one rank asks for all exchange, once; the others' gradients stay as they are."""
    case = case_of(is_weighted=True)
    trained = [case.batch(2 + rank, seed=rank).weights().clone().requires_grad_() for rank in range(2)]

    def work(sharded, batch, env):
        before = len(env.communicator.labels)
        own = with_parts(batch, weights=trained[1]) if env.rank == 1 else batch
        sharded(own).values().square().sum().backward()
        return env.communicator.labels[before:], sharded.full_state_dict()

    seen = simulate(case, work)
    calls = ["headers", "ids", "results", "gradients", "gradients of weights"]
    assert [labels for labels, _ in seen] == [calls] * 2
    assert trained[0].grad is None
    expected = case.batch(3, seed=1).weights().clone().requires_grad_()
    case.module()(with_parts(case.batch(3, seed=1), weights=expected)).values().square().sum().backward()
    torch.testing.assert_close(trained[1].grad, expected.grad)
    weights = unsharded_weights(lambda module, batch, _: module(batch).values().square().sum(), case)
    torch.testing.assert_close(seen[0][1], weights)


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


@drawn(cuts(with_copies=True), st.lists(st.integers(0, 3), min_size=3, max_size=3), quick=15, thorough=60)
def test_any_cut_equals_unsharded_after_two_steps(case, batch_sizes):
    def train(env):
        sharded = case.shard(env, module)
        outputs = []
        for step in range(2):
            values = sharded(case.batch(batch_sizes[env.rank], seed=10 * step + env.rank)).values()
            outputs.append(values.detach())
            (values * torch.arange(values.shape[1])).sum().backward()
        return outputs, sharded.full_state_dict()

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
