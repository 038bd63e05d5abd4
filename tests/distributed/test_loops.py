"""Training loops that people write: either they train as one process does, or an error on all ranks says what to do."""

from __future__ import annotations

import math

import pytest
import torch
from tests.distributed import loop_workers, workers
from tests.distributed.test_training import assert_same_state, of_ranks, trained_by_sgd, unsharded_after
from tests.equality import Case
from tests.plugins.training.test_equality import tables_of

from shardwright import DefaultDataParallelWrapper, InvalidInputError
from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed

STEPS = 3
FUSED, VISIBLE = "fused_torch", "dense"


def same_text(texts: list[str]) -> str:
    """The text of all ranks."""
    assert len(set(texts)) == 1, texts
    return texts[0]


def unsharded_after_sums(steps: int) -> dict[str, torch.Tensor]:
    """One process on two batches of each of two ranks a step, with SGD."""
    batches = (of_ranks(2 * step, 2) + of_ranks(2 * step + 1, 2) for step in range(steps))
    return trained_by_sgd(workers.clicks(), batches, 2)


@pytest.mark.parametrize("how", ["variable", "by hand"])
def test_local_world_size_that_differs_on_one_rank_is_the_same_error_on_all(pool: RankPool, how: str) -> None:
    case = Case(tables_of("table_row_wise", "fused_torch"), (3, 2, 4, 1), local_world_size=2)
    text = same_text(pool.run(loop_workers.local_world_sizes_that_differ, 4, case, how))
    assert text.startswith("DistributedError: ")
    assert "LOCAL_WORLD_SIZE is ranks 0, 2, 3: 2; rank 1: 1" in text


def test_collection_that_is_left_alone_trains_beside_sharded_ones_as_in_one_process(pool: RankPool) -> None:
    expected = trained_by_sgd(loop_workers.TwoTowers(), (of_ranks(step, 2) for step in range(STEPS)), 2)
    for paths, state in pool.run(loop_workers.train_beside_tables_left_alone, 2, STEPS):
        assert paths == ["right.sparse.bags"]
        assert_same_state(state, expected)


@pytest.mark.parametrize(
    ("around", "finds_unused"),
    [("model", True), ("model", False), ("enclosing module", True), ("bare collection", True)],
)
def test_data_parallel_around_sharded_tables_trains_as_one_process(
    pool: RankPool, around: str, finds_unused: bool
) -> None:
    states = pool.run(loop_workers.train_in_data_parallel, 2, around, STEPS, finds_unused=finds_unused)
    expected = unsharded_after(range(STEPS), 2)[0].state_dict()
    for state in states:
        assert_same_state(state, expected)


def test_data_parallel_without_sums_trains_on_both_batches(pool: RankPool) -> None:
    expected = unsharded_after_sums(STEPS)
    for state in pool.run(loop_workers.accumulate_without_sums, 2, STEPS):
        assert_same_state(state, {name: expected[name] for name in state})


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ("model", r"UnsupportedError: .*init_data_parallel=False"),
        ("enclosing module", r"UnsupportedError: .*init_data_parallel=False"),
        ("inner module", r"UnsupportedError: .*init_data_parallel=False"),
        (
            "a part before",
            r"UnsupportedError: .*averaged over the ranks already \(by DistributedDataParallel\)",
        ),
        ("before", r"InvalidInputError: the collection at .* is inside a DistributedDataParallel"),
        ("nothing dense", r"UnsupportedError: DistributedDataParallel has nothing to do"),
    ],
)
def test_data_parallel_that_would_be_wrong_is_refused_and_nothing_is_changed(
    pool: RankPool, around: str, expected: str
) -> None:
    same_text(texts := pool.run(loop_workers.data_parallel_twice, 2, around))
    assert_matches(expected, texts[0])


def assert_matches(expected: str, text: str) -> None:
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(text)


def test_dense_parameters_with_optimizers_in_backward_are_refused(pool: RankPool) -> None:
    text = same_text(pool.run(loop_workers.optimizers_of_dense_parameters_in_backward, 2))
    assert text.startswith(
        "UnsupportedError: 2 dense parameters, the first of shape [1, 48], have optimizers in"
    )


@pytest.mark.parametrize("is_clipped", [False, True])
def test_scaled_loss_that_no_autocast_shows_is_refused_at_the_first_step(
    pool: RankPool, is_clipped: bool
) -> None:
    """Clipping divides gradients, too."""
    scaled, plain = zip(
        *pool.run(loop_workers.scaled_without_autocast, 2, is_clipped=is_clipped), strict=True
    )
    text = same_text(list(scaled))
    assert text.startswith("UnsupportedError: gradients of dense parameters were divided by 1024 ")
    assert "is updated in the backward pass, and has taken the gradient of the scaled loss" in text
    assert set(plain) == {"nothing was raised"}


@pytest.mark.parametrize("given", ["dense", "dense, after tables", "both"])
def test_scaler_that_is_not_given_the_optimizer_of_tables_updated_in_the_step_is_refused(
    pool: RankPool, given: str
) -> None:
    texts, unchanged = zip(*pool.run(loop_workers.scaled_tables_in_step, 2, given), strict=True)
    if given == "both":
        assert set(texts) == {"nothing was raised"}
        return
    text = same_text(list(texts))
    assert text.startswith("UnsupportedError: gradients of dense parameters were divided by 1024 ")
    assert "Give scaler.step() its optimizer, too" in text
    assert set(unchanged) == {given == "dense"}


def test_dense_gradients_that_are_divided_by_hand_are_no_scaled_loss(pool: RankPool) -> None:
    assert set(pool.run(loop_workers.halved_by_hand, 2)) == {"nothing was raised"}


def test_clipping_on_one_rank_is_told_to_those_that_wait_for_it(pool: RankPool) -> None:
    waited, refused = pool.run(loop_workers.one_rank_clips, 2)
    assert refused.startswith("UnsupportedError: ")
    assert waited.startswith(
        "DistributedError: rank 0: the dense parameters in forward pass 2 failed: rank 1 raised UnsupportedError: "
    )


@pytest.mark.parametrize("how", ["two forward passes", "same graph", "inner module", "autograd.grad"])
def test_backward_pass_in_which_gradients_are_not_averaged_is_the_same_error_on_all_and_the_next_step_trains(
    pool: RankPool, how: str
) -> None:
    results = pool.run(loop_workers.backward_passes, 2, how)
    text = same_text([text for text, _, _ in results])
    start = (
        "torch.autograd.grad was" if how == "autograd.grad" else "a backward pass came to dense parameters"
    )
    assert text.startswith(f"UnsupportedError: {start}")
    for states in ([raised for _, raised, _ in results], [trained for _, _, trained in results]):
        torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert not torch.equal(results[0][1]["weight"], results[0][2]["weight"])


def test_several_forward_passes_and_one_backward_pass_train_as_one_process(pool: RankPool) -> None:
    expected = unsharded_after_sums(STEPS)
    for state in pool.run(loop_workers.train_on_sums, 2, STEPS):
        assert_same_state(state, expected)


@pytest.mark.parametrize("how", ["autograd.grad", "inputs"])
def test_gradients_asked_for_beside_tables_updated_in_backward_are_refused(pool: RankPool, how: str) -> None:
    kernels = {"user": VISIBLE, "item": FUSED, "shop": VISIBLE}
    results = pool.run(loop_workers.partial_pass, 2, how, kernels)
    text = same_text([text for text, _ in results])
    assert text.startswith("UnsupportedError: torch.autograd.grad, or backward(inputs=...), went through ")
    assert "table 'bags.item' (31 x 16 FP32)" in text
    assert all(unchanged for _, unchanged in results)


@pytest.mark.parametrize("how", ["autograd.grad", "inputs"])
def test_gradients_asked_for_of_tables_that_show_theirs_are_given(pool: RankPool, how: str) -> None:
    kernels = dict.fromkeys(("user", "item", "shop"), VISIBLE)
    assert pool.run(loop_workers.partial_pass, 2, how, kernels) == [("nothing was raised", True)] * 2


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("frozen", r"UnsupportedError: table 'sparse.bags.\w+' .* was frozen .* after it was sharded"),
        (
            "dense frozen",
            r"InvalidInputError: parameter 'over.bias' was frozen .* after the model was wrapped",
        ),
        ("unfrozen", r"InvalidInputError: parameter 'over.weight' was frozen when the model was wrapped"),
        ("replaced", r"InvalidInputError: parameter 'over.weight' was replaced"),
        ("assigned", r"InvalidInputError: load_state_dict\(assign=True\) would replace dense parameters"),
        ("assigned inside", r"InvalidInputError: parameter 'over.weight' was replaced"),
    ],
)
def test_parameters_changed_after_sharding_are_an_error_on_all_ranks(
    pool: RankPool, how: str, expected: str
) -> None:
    for text in pool.run(loop_workers.changed_after_sharding, 2, how):
        assert_matches(expected, text)


def test_frozen_tables_can_be_looked_up_without_gradients_and_unfrozen(pool: RankPool) -> None:
    assert pool.run(loop_workers.frozen_and_looked_up, 2) == [(False, True)] * 2


def test_state_assigned_before_the_model_is_wrapped_trains_as_one_process(pool: RankPool) -> None:
    expected = unsharded_after(range(STEPS), 2)[0].state_dict()
    for state in pool.run(loop_workers.assigned_before_wrapping, 2, STEPS):
        assert_same_state(state, expected)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_state_loaded_on_one_rank_alone_is_an_error_that_says_so(pool: RankPool, what: str) -> None:
    text = same_text(pool.run(loop_workers.one_rank_loads, 2, what))
    called = "the optimizer's load_state_dict() of " if what == "optimizer" else "load_state_dict()"
    assert text.startswith("DistributedError: the ranks make different calls: ")
    assert f"rank 1: {called}" in text


@pytest.mark.parametrize("use", ["loop", "pipeline"])
def test_dropped_models_are_freed_at_once_with_their_descriptors(pool: RankPool, use: str) -> None:
    for alive, more_descriptors in pool.run(loop_workers.dropped_models, 2, 4, use):
        assert alive == [0] * 4
        assert more_descriptors <= 0


@pytest.mark.parametrize(
    "how",
    [
        "inner",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("eager", "whole step", "aot_eager", "in place")
        ),
    ],
)
def test_compiled_model_trains_exactly_as_the_model_does(pool: RankPool, how: str) -> None:
    for (plain, compiled), num_graphs in pool.run(loop_workers.compiled, 2, how, STEPS):
        assert num_graphs >= 1
        torch.testing.assert_close(compiled, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrapper", "drops_head"),
    [
        (DefaultDataParallelWrapper(find_unused_parameters=True), True),
        (DefaultDataParallelWrapper(static_graph=True, bucket_cap_mb=1), False),
    ],
)
def test_options_of_the_data_parallel_wrapper_reach_it_and_train(
    pool: RankPool, wrapper: DefaultDataParallelWrapper, drops_head: bool
) -> None:
    for equal, options in pool.run(loop_workers.dense_options, 2, wrapper, drops_head=drops_head):
        assert all(equal)
        assert options == {
            "static_graph": wrapper.static_graph,
            "find_unused_parameters": wrapper.find_unused_parameters,
            "bucket_bytes": (wrapper.bucket_cap_mb or 25) * 2**20,
        }


def test_options_that_follow_from_the_model_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="ddp_kwargs has 'process_group', which follow from the model"
    ):
        DefaultDataParallelWrapper(ddp_kwargs={"process_group": None})


@pytest.mark.parametrize("what", ["dense", "rest"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fully_sharded_dense_modules_train_as_one_process(pool: RankPool, what: str) -> None:
    expected = unsharded_after(range(3), 2)[0].state_dict()
    for state in pool.run(loop_workers.fully_sharded, 2, what):
        assert_same_state(state, expected)


def test_norm_over_ranks_counts_all_of_what_fully_shard_cuts(pool: RankPool) -> None:
    module = workers.clicks()
    sum(module(workers.batch(0, rank)).square().mean() / 2 for rank in range(2)).backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    expected = [float(torch.nn.utils.get_total_norm(gradients, kind)) for kind in (2.0, math.inf)]
    for norms in pool.run(loop_workers.norms_of_fully_sharded, 2):
        assert norms == pytest.approx(expected, rel=1e-5)


def test_fully_shard_of_the_whole_model_is_refused_on_all_ranks(pool: RankPool) -> None:
    for text in pool.run(loop_workers.fully_sharded, 2, "root"):
        assert text.startswith("UnsupportedError: table 'sparse.bags.user'")
        assert "fully_shard" in text
        assert "init_data_parallel=False" in text


def test_activation_checkpoints_train_as_one_process(pool: RankPool) -> None:
    expected = unsharded_after(range(3), 2)[0].state_dict()
    for state, _ in pool.run(loop_workers.checkpointed_and_autocast, 2, "checkpoint"):
        assert_same_state(state, expected)


def test_autocast_to_bfloat16_trains_near_one_process(pool: RankPool) -> None:
    expected = unsharded_after(range(3), 2)[0].state_dict()
    for state, _ in pool.run(loop_workers.checkpointed_and_autocast, 2, "autocast"):
        torch.testing.assert_close(state, expected, rtol=0.02, atol=0.02)


def test_no_sync_beside_tables_updated_in_backward_is_refused_by_argument(pool: RankPool) -> None:
    for text in pool.run(loop_workers.no_sync_beside_updates_in_backward, 2):
        assert "is updated in each backward pass" in text
        assert "update='in_step'" in text
