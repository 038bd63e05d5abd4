"""What is wrong with a batch on one rank is the same error on all, and the next good batch trains."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.plans import FUSED, Cut, Cuts, train_step, train_unsharded

from shardwright import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    InvalidInputError,
    KeyedJaggedTensor,
    RowsRange,
)
from shardwright.runtime.step.batches import inputs
from shardwright.runtime.step.batches.inputs import InputChecks
from shardwright.runtime.step.batches.ranges import are_in_range
from shardwright.runtime.step.segments import LastResult
from shardwright_plugins.dataflows import Replicate
from shardwright_testing import run_simulated

BAGS = Cuts(
    [
        Cut(11, 4, ("a",), "SUM", RowsRange(11, parts=2), (), (0, 1)),
        Cut(9, 6, ("b", "a"), "MEAN", None, (2, 4), (1, 0)),
        Cut(7, 3, ("c",), ranks=(0, 1), dataflow=Replicate()),
    ],
    2,
)
WEIGHTED = evolve(BAGS, is_weighted=True)
SEQUENCES = evolve(BAGS, tables=[evolve(table, pooling="NONE") for table in BAGS.tables])
CASES = {"bags": BAGS, "weighted": WEIGHTED, "sequences": SEQUENCES}


def changed(batch: KeyedJaggedTensor, **parts) -> KeyedJaggedTensor:
    given_parts = {"keys": batch.keys(), "values": batch.values(), "lengths": batch.lengths()}
    return KeyedJaggedTensor(**{**given_parts, "weights": batch.weights_or_none(), **parts})


def with_entry(values: torch.Tensor, batch: KeyedJaggedTensor, feature: str, entry) -> torch.Tensor:
    """`values` with another one at the second id of `feature`."""
    values = values.clone()
    values[batch.offset_per_key()[batch.keys().index(feature)] + 1] = entry
    return values


def with_id(feature: str, entry: int):
    return lambda batch: changed(batch, values=with_entry(batch.values(), batch, feature, entry))


def with_weight(feature: str, entry: float):
    return lambda batch: changed(batch, weights=with_entry(batch.weights(), batch, feature, entry))


def without(feature: str):
    return lambda batch: batch.permute([i for i, key in enumerate(batch.keys()) if key != feature])


def with_feature(name: str):
    def add(batch):
        own = batch["a"]
        lengths = torch.cat([batch.lengths(), own.lengths()])
        weights = batch.weights_or_none()
        return KeyedJaggedTensor(
            keys=[*batch.keys(), name],
            values=torch.cat([batch.values(), own.values()]),
            lengths=lengths,
            weights=None if weights is None else torch.cat([weights, own.weights()]),
        )

    return add


def with_weights(batch):
    return changed(batch, weights=torch.ones(batch.values().numel()))


def without_weights(batch):
    return changed(batch, weights=None)


A = "feature 'a' of table 't1' (9 x 6 FP32)"
STRICT = "which strict checks refuse: leave"
UNKNOWN = f"feature 'bb': no table of the collection looks it up, {STRICT} it out. Did you mean 'b'?"
BELOW_9 = "of its values; ids must be 0 <= id < 9: hash or clamp them before the lookup"
NOT_WEIGHTED = f"{A}: the collection is not weighted but the KeyedJaggedTensor has weights"

WRONG = [
    ("bags", "standard", with_id("a", 9), f"{A} has the id 9 at position 1 {BELOW_9}"),
    ("sequences", "standard", with_id("a", -3), f"{A} has the id -3 at position 1 {BELOW_9}"),
    ("weighted", "standard", with_id("a", 2**62), f"{A} has the id {2**62} at position 1 {BELOW_9}"),
    ("bags", "strict", with_id("a", -(2**63)), f"{A} has the id {-(2**63)} at position 1 {BELOW_9}"),
    (
        "bags",
        "standard",
        with_id("c", 7),
        "feature 'c' of table 't2' (7 x 3 FP32) has the id 7 at position 1 of its values; ids must be 0 <= id < 7: "
        "hash or clamp them before the lookup",
    ),
    *(
        (case, checks, without("a"), f"{A} is missing from the KeyedJaggedTensor, whose keys are 'c', 'b'.")
        for case in CASES
        for checks in ("off", "standard", "strict")
    ),
    ("bags", "strict", with_feature("bb"), UNKNOWN),
    ("weighted", "strict", with_feature("bb"), UNKNOWN),
    ("sequences", "strict", with_weights, f"{NOT_WEIGHTED}, {STRICT} them out"),
    (
        "weighted",
        "off",
        without_weights,
        f"{A}: the collection is weighted but the KeyedJaggedTensor has no weights",
    ),
    (
        "weighted",
        "strict",
        with_weight("a", float("nan")),
        f"{A} has the weight nan at position 1 of its values; weights must be finite",
    ),
    (
        "weighted",
        "strict",
        with_weight("a", float("-inf")),
        f"{A} has the weight -inf at position 1 of its values; weights must be finite",
    ),
]


def shard(case: Cuts, env, module, checks: str | None):
    kind = EmbeddingBagCollectionSharder if case.is_pooled else EmbeddingCollectionSharder
    return kind(FUSED, input_checks=checks).shard(module, case.shardings(), env, "cpu")


def rank_batch(case: Cuts, step: int, rank: int) -> KeyedJaggedTensor:
    """A batch in which every feature has two ids or more."""
    seed = 10 * step + rank
    while min(case.batch(6, seed=seed).length_per_key()) < 2:
        seed += 100
    return case.batch(6, seed=seed)


def simulate(case: Cuts, work):
    module = case.module()
    return run_simulated(lambda env: work(env, module), 2)


@pytest.mark.parametrize(("name", "checks", "spoil", "expected"), WRONG)
def test_wrong_batch_of_one_rank_raises_on_all_and_the_next_one_trains(name, checks, spoil, expected):
    case = CASES[name]

    def work(env, module):
        sharded = shard(case, env, module, checks)
        good = rank_batch(case, 0, env.rank)
        with pytest.raises(InvalidInputError) as error:
            sharded(spoil(good) if env.rank == 1 else good)
        unchanged = sharded.full_state_dict()
        labels = len(env.communicator.labels)
        train_step(case, sharded, good, 0, env.rank)
        assert isinstance(error.value, IndexError) is ("has the id" in str(error.value))
        return str(error.value), unchanged, sharded.full_state_dict(), env.communicator.labels[labels:]

    before = case.module().state_dict()
    after = train_unsharded(case, [[rank_batch(case, 0, rank) for rank in range(2)]])
    for text, unchanged, trained, labels in simulate(case, work):
        assert text == f"rank 1: {expected}"
        assert "object" not in labels  # a good batch costs no collective more
        for key, value in before.items():
            assert torch.equal(unchanged[key], value)
            torch.testing.assert_close(trained[key], after[key])


@pytest.mark.parametrize(
    ("name", "checks", "same"),
    [
        ("bags", "standard", with_feature("bb")),
        ("bags", "standard", with_weights),
        ("sequences", "standard", with_weights),
        ("bags", "off", with_weights),
    ],
)
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_what_is_not_looked_at_is_fine(name, checks, same, ranks):
    case = CASES[name]

    def work(env, module):
        sharded = shard(case, env, module, checks)
        batch = rank_batch(case, 0, env.rank)
        train_step(case, sharded, same(batch) if env.rank in ranks else batch, 0, env.rank)
        return sharded.full_state_dict()

    after = train_unsharded(case, [[rank_batch(case, 0, rank) for rank in range(2)]])
    for trained in simulate(case, work):
        for key, value in after.items():
            torch.testing.assert_close(trained[key], value)


@pytest.mark.parametrize(("checks", "reads"), [("off", 0), ("standard", 1), ("strict", 1)])
def test_ids_are_passed_over_once_or_with_checks_off_not_at_all(monkeypatch, checks, reads):
    seen = []
    check = are_in_range
    monkeypatch.setattr(
        "shardwright.runtime.step.batches.inputs.are_in_range",
        lambda *args: seen.append(args) or check(*args),
    )

    def work(env, module):
        sharded = shard(BAGS, env, module, checks)
        sharded(rank_batch(BAGS, 0, 0)).values()

    simulate(BAGS, work)
    assert len(seen) == 2 * reads


def test_wrong_ids_of_a_feature_that_is_not_looked_up_are_nobodys_business():
    def work(env, module):
        batch = with_feature("bb")(rank_batch(BAGS, 0, 0))
        return shard(BAGS, env, module, "standard")(with_id("bb", -1)(batch)).values()

    expected = BAGS.module()(rank_batch(BAGS, 0, 0)).values()
    for output in simulate(BAGS, work):
        torch.testing.assert_close(output.detach(), expected.detach())


@pytest.mark.parametrize("wrong", [-1, 9, 2**62])
@pytest.mark.parametrize("level", ["ignore", "warning"])
def test_ids_out_of_range_are_looked_up_as_id_0(level, wrong):
    def work(env, module):
        batch = with_id("a", wrong)(rank_batch(BAGS, 0, 0))
        sharded = shard(BAGS, env, module, level)
        return [sharded(batch).values().detach() for _ in range(2)]

    expected = BAGS.module()(with_id("a", 0)(rank_batch(BAGS, 0, 0))).values()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = simulate(BAGS, work)
    for outputs in results:
        for output in outputs:
            torch.testing.assert_close(output, expected.detach())
    texts = [str(warning.message) for warning in caught if "are looked up as id 0" in str(warning.message)]
    assert len(texts) == (2 if level == "warning" else 0)  # one of each rank
    assert all(f"{A}: 1 of " in text and "ids are not 0 <= id < 9" in text for text in texts)


def test_checks_are_named_by_argument_then_variable_then_standard(monkeypatch):
    assert InputChecks.of(None, {}) is InputChecks.STANDARD
    assert InputChecks.of(None, {"SHARDWRIGHT_INPUT_CHECKS": "off"}) is InputChecks.OFF
    assert InputChecks.of("strict", {"SHARDWRIGHT_INPUT_CHECKS": "off"}) is InputChecks.STRICT
    monkeypatch.setenv("SHARDWRIGHT_INPUT_CHECKS", "strict")
    assert EmbeddingBagCollectionSharder().input_checks is InputChecks.STRICT
    with pytest.raises(
        InvalidInputError, match=r"input_checks is 'strikt'; it must be one of off, standard, strict"
    ):
        EmbeddingBagCollectionSharder(input_checks="strikt")
    monkeypatch.setenv("SHARDWRIGHT_INPUT_CHECKS", "none")
    with pytest.raises(InvalidInputError, match="SHARDWRIGHT_INPUT_CHECKS is 'none'; it must be one of"):
        EmbeddingBagCollectionSharder()


features_of_ids = st.lists(
    st.tuples(
        st.one_of(st.just(-1), st.integers(0, 5), st.just(2**63 - 1)),
        st.lists(st.one_of(st.integers(-2, 7), st.sampled_from([-(2**63), 2**63 - 1, 2**62])), max_size=4),
    ),
    max_size=5,
)


@given(features_of_ids)
def test_are_in_range_is_what_a_loop_over_the_ids_says(features):
    highest = torch.tensor([most for most, _ in features], dtype=torch.int64)
    values = torch.tensor([id for _, ids in features for id in ids], dtype=torch.int64)
    expected = all(most == -1 or 0 <= id <= most for most, ids in features for id in ids)
    assert (
        are_in_range(
            values, np.array([len(ids) for _, ids in features], dtype=np.int64), highest, LastResult()
        )
        == expected
    )


@pytest.mark.gpu
def test_are_in_range_on_a_gpu_is_as_on_the_cpu():
    generator = np.random.default_rng(3)
    for _ in range(50):
        counts = generator.integers(0, 4, size=5)
        highest = torch.from_numpy(generator.integers(-1, 6, size=5))
        values = torch.from_numpy(generator.integers(-1, 7, size=int(counts.sum())))
        own = (values.cuda(), torch.from_numpy(counts).cuda(), highest.cuda())
        assert bool(inputs._out_of_range(*own).any()) is not are_in_range(
            values, counts, highest, LastResult()
        )
