"""The conformance kit finds each deliberate mistake, and says which it is; what the mutants are made from it passes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.plugins.conformance.mistakes import mutants, wrong_extensions

import shardwright_testing as testing
from shardwright.host import host

COVER = "test_layouts_cover_each_row_and_column_once"
BIJECTION = "test_row_maps_are_bijections_onto_their_parts"
COUNTING = "test_rows_of_large_tables_are_counted_without_listing_them"

# Mutant, the kit, the test that is to fail, and what its message is to say.
MUTANTS = [
    (
        mutants.OffByOneRows,
        "ShardingTypeTests",
        BIJECTION,
        r"rows_of\(\d\) has row \d+, part_of sends it elsewhere",
    ),
    (mutants.DoubleCounted, "ShardingTypeTests", COVER, r"row 0, column 0 is in 2 blocks, it must be in 1"),
    (mutants.LastColumnLost, "ShardingTypeTests", COVER, r"row 0, column 1 is in 0 blocks, it must be in 1"),
    (
        mutants.AlternatingRanks,
        "ShardingTypeTests",
        "test_layouts_are_the_same_each_time",
        r"offers other layouts when it is asked again",
    ),
    (
        mutants.UnlistedMap,
        "ShardingTypeTests",
        "test_row_maps_and_dataflows_come_back_from_a_plan",
        r"cannot be read back from a plan: .* Is its class in row_maps\?",
    ),
    (
        mutants.ListsRows,
        "ShardingTypeTests",
        COUNTING,
        r"num_rows_of\(0\) takes \d+ bytes for a table of 10000000 rows: it lists them.*give it a formula",
    ),
    (
        mutants.ListsNeighbours,
        "ShardingTypeTests",
        COUNTING,
        r"whether the rows of part 0 are neighbours takes \d+ bytes .* keeps_neighbours = False",
    ),
    (
        mutants.WrongMemory,
        "ComputeKernelTests",
        "test_declared_memory_is_what_is_allocated",
        r"adagrad, FP32: memory_bytes\(\) declares 1024000 bytes for 4000 rows, 20480\d\d are allocated \(0.50 of it",
    ),
    (
        mutants.OneTimeForAll,
        "ComputeKernelTests",
        "test_declarations_can_be_planned_with",
        r"times_ms\(\) of lookups has the shapes \(1,\) for 3 blocks and \(1,\) for none",
    ),
    (
        mutants.AsksForDoubles,
        "ComputeKernelTests",
        "test_declarations_can_be_planned_with",
        r"columns\(\) asks for 'time' of float64, columns of ids are int64 or float32",
    ),
    (
        mutants.WeighsByAColumn,
        "ComputeKernelTests",
        "test_forward_sums_the_rows_of_each_bag",
        r"the weights of ids are lost: these are the plain sums",
    ),
    (
        mutants.NoCache,
        "ComputeKernelTests",
        "test_declarations_can_be_planned_with",
        r"caches_rows is True, and with caches of 5 % and 90 % of the rows memory_bytes\(\) are",
    ),
    (
        mutants.LostIdWeights,
        "ComputeKernelTests",
        "test_forward_sums_the_rows_of_each_bag",
        r"the weights of ids are lost: these are the plain sums",
    ),
    (
        mutants.UpdateWithoutIdWeights,
        "ComputeKernelTests",
        "test_backward_updates_rows_or_shows_their_gradients",
        r"weights of block 0 after the update: the weights of ids are lost: this is the update without them",
    ),
    (
        mutants.LostCheckpoint,
        "ComputeKernelTests",
        "test_weights_share_storage_with_what_is_looked_up",
        r"what was written into weight\(\) is lost",
    ),
    (
        mutants.SumsAlone,
        "ComputeKernelTests",
        "test_forward_sums_the_rows_of_each_bag",
        r"'sums_alone' broke its contract: forward\(\) for the tables .* returned \(Tensor\).* must return a pair",
    ),
    (
        mutants.DividesItself,
        "ComputeKernelTests",
        "test_forward_sums_the_rows_of_each_bag",
        r"these are means; kernels always sum, and the engine divides",
    ),
    (
        mutants.PromisesTooMuch,
        "ComputeKernelTests",
        "test_what_is_supported_is_built_and_looked_up",
        r"BF16, pooling SUM, columns .*: is supported, but build\(\) raised",
    ),
    (
        mutants.RateOfTheLastForward,
        "ComputeKernelTests",
        "test_step_keeps_the_learning_rate_of_its_forward_pass",
        r"forward pass at the learning rate 0.1, then others: weights of block 0 after the update",
    ),
    (
        mutants.HalvesNeverTrained,
        "ComputeKernelTests",
        "test_backward_updates_rows_or_shows_their_gradients",
        r"adagrad, step 0 of batches of .*: weights of block 0 after the update: nothing was updated\.",
    ),
    (
        mutants.NotFinite,
        "EstimatorTests",
        "test_estimates_are_finite_and_not_negative",
        r"lookup of a shard of .* is (inf|nan); it must be finite and not negative",
    ),
    (
        mutants.FallsWithBytes,
        "EstimatorTests",
        "test_estimates_never_fall_with_more_bytes",
        r"times as many rows, .* of 't0' .* falls from",
    ),
    (
        mutants.NotColumnar,
        "EstimatorTests",
        "test_estimates_of_columns_are_those_of_tables_one_by_one",
        r"with other tables and .* on its own",
    ),
    (
        mutants.Shuffled,
        "ProposerTests",
        "test_proposals_are_the_same_each_time",
        r"is not deterministic: proposal \d+ is .* when it is asked again",
    ),
    pytest.param(
        mutants.Endless,
        "ProposerTests",
        "test_proposals_end",
        r"does not end: more than 5000 proposals for \d tables",
        marks=pytest.mark.slow,
    ),
    (
        mutants.AnotherTables,
        "ProposerTests",
        "test_proposals_keep_the_contract",
        r"'another_tables' broke its contract: .* with an option of another table",
    ),
    (
        mutants.OverCapacity,
        "PartitionerTests",
        "test_placements_keep_to_capacities_ranks_and_hosts",
        r"rank \d is over its capacity: it was given \d+ bytes of (hbm|ddr), it has \d+",
    ),
    (
        mutants.RandomOrder,
        "PartitionerTests",
        "test_placements_are_the_same_each_time",
        r"is not deterministic: .* when it is asked again",
    ),
    (
        mutants.SaysNothing,
        "PartitionerTests",
        "test_what_fits_nowhere_is_told",
        r"does not say why: 0 bytes are needed and 0 are free",
    ),
    (
        mutants.BoundTooSmall,
        "CodecTests",
        "test_values_come_back_within_the_error_bound",
        r"came back as .*; the bound is",
    ),
    (
        mutants.ChangesInput,
        "CodecTests",
        "test_values_come_back_within_the_error_bound",
        r"encode changed its input",
    ),
    (
        mutants.DrawsLots,
        "CodecTests",
        "test_bytes_are_the_same_each_time",
        r"encodes the same values to other bytes",
    ),
    (
        wrong_extensions.LongHelp,
        "ExtensionTests",
        "test_extension_does_what_its_point_asks",
        r"help must be one line of 100 characters",
    ),
    (
        wrong_extensions.NameOfCore,
        "ExtensionTests",
        "test_extension_does_what_its_point_asks",
        r"has a command plan already",
    ),
    (
        wrong_extensions.LosesTables,
        "ExtensionTests",
        "test_extension_does_what_its_point_asks",
        r"'user' is not in the report",
    ),
    (
        wrong_extensions.NoFinding,
        "ExtensionTests",
        "test_extension_does_what_its_point_asks",
        r"yields 'fine', which is no Finding",
    ),
    (
        wrong_extensions.NoSharder,
        "ExtensionTests",
        "test_extension_does_what_its_point_asks",
        r"makes 'fine', which is no ModuleSharder",
    ),
    (
        wrong_extensions.BelievesAnything,
        "ExtensionTests",
        "test_extension_does_what_its_point_asks",
        r"believes without data that no plan takes less than 1e\+12 ms",
    ),
    (
        wrong_extensions.OtherEachTime,
        "ExtensionTests",
        "test_extension_does_what_its_point_asks",
        r"gives another plan of the same tables the second time",
    ),
    (
        wrong_extensions.LoadsNothing,
        "ExtensionTests",
        "test_extension_loads_something_that_can_be_called",
        r"loads None, which cannot be called",
    ),
    (
        mutants.ImportsTorch,
        "ExtensionTests",
        "test_module_imports_nothing_heavy",
        r"importing tests.plugins.conformance.mistakes.mutants imports .*torch; import it in load\(\)",
    ),
    pytest.param(
        mutants.MixesUpRanks,
        "CommBackendTests",
        "test_collectives_equal_a_reference",
        r"all_to_all of torch.uint8, splits 0: got \[",
        marks=pytest.mark.distributed,
    ),
    pytest.param(
        mutants.SwallowsErrors,
        "CommBackendTests",
        "test_rank_that_does_not_come_is_an_error_on_the_others",
        r"an exchange to which no other rank came ended without an error",
        marks=[pytest.mark.distributed, pytest.mark.slow],
    ),
]
RIGHT = [
    ("EstimatorTests", mutants.RightEstimator),
    ("ProposerTests", mutants.RightProposer),
    ("PartitionerTests", mutants.RightPartitioner),
    ("CodecTests", mutants.RightCodec),
    ("ExtensionTests", wrong_extensions.RightExtension),
    ("ComputeKernelTests", mutants.RightKernel),
]


def arguments_of(tests: Any, method: Any) -> Iterator[dict[str, Any]]:
    """What pytest would give a test beside the plugin."""
    marks = [mark for mark in getattr(method, "pytestmark", []) if mark.name == "parametrize"]
    given: list[dict[str, Any]] = [{}]
    for mark in marks:
        name, values = mark.args
        given = [{**one, name: value} for one in given for value in values]
    if "optimizer" in inspect.signature(method).parameters:
        given = [{**one, "optimizer": value} for one in given for value in tests.optimizers]
    yield from given


def failure_of(kit: str, name: str, plugin: Any) -> str:
    """The message with which a test of a kit fails; empty if it passes."""
    tests = getattr(testing, kit)()
    method = getattr(tests, name)
    for arguments in arguments_of(tests, method):
        try:
            method(plugin, **arguments)
        except pytest.skip.Exception:
            continue
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def methods_of(kit: str) -> list[str]:
    return [name for name, _ in inspect.getmembers(getattr(testing, kit)) if name.startswith("test_")]


@pytest.mark.parametrize(
    ("mutant", "kit", "test", "message"), MUTANTS, ids=lambda value: getattr(value, "name", None)
)
def test_mutant_fails_the_kit_with_a_message_that_says_what_is_wrong(
    mutant: Any, kit: str, test: str, message: str
) -> None:
    assert_fails_the_kit(mutant, kit, test, message)


def assert_fails_the_kit(mutant: Any, kit: str, test: str, message: str) -> None:
    failure = failure_of(kit, test, mutant())
    assert mutant.name in failure
    assert re.search(message, failure), failure


@pytest.mark.slow  # in each run, a mutant fails one test of its kit
@pytest.mark.parametrize(("kit", "right"), RIGHT)
def test_what_mutants_are_made_from_passes_the_kit(kit: str, right: Any) -> None:
    failures = {name: failure_of(kit, name, right()) for name in methods_of(kit)}
    assert {name: text for name, text in failures.items() if text} == {}


def test_engine_that_forgets_to_divide_means_fails_the_kit_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    means = "shardwright.runtime.step.arrangement._Means"
    for name in ("divide", "divided"):
        monkeypatch.setattr(f"{means}.{name}", lambda self, columns, batch: columns)
    failure = failure_of(
        "ShardingTypeTests",
        "test_sharded_module_equals_unsharded",
        host().sharding_types.create("table_wise"),
    )
    assert "times as much, the sum of the bag's rows where their mean was asked" in failure


def test_engine_that_adds_a_partial_sum_twice_fails_the_kit_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shardwright.runtime.step.arrangement import PooledArrangement

    right = PooledArrangement.outputs

    def twice(self: Any, brought: Any, batch: Any) -> Any:
        return [2 * output for output in right(self, brought, batch)]

    monkeypatch.setattr(PooledArrangement, "outputs", twice)
    failure = failure_of(
        "ShardingTypeTests",
        "test_sharded_module_equals_unsharded",
        host().sharding_types.create("table_wise"),
    )
    assert "twice as much, rows were counted twice" in failure
