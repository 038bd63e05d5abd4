"""TorchRec's planner over shardwright's: its classes, and what scripts have written after its interfaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder
from shardwright_torchrec.planner.enumerators import EmbeddingEnumerator
from shardwright_torchrec.planner.partitioners import (
    GreedyPerfPartitioner,
    MemoryBalancedPartitioner,
    SortBy,
)
from shardwright_torchrec.planner.planners import EmbeddingShardingPlanner
from shardwright_torchrec.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from shardwright_torchrec.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from shardwright_torchrec.planner.stats import NoopPerfModel, NoopStorageModel
from shardwright_torchrec.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from shardwright_torchrec.planner.types import (
    Partitioner,
    Perf,
    PlannerError,
    PlannerErrorType,
    Proposer,
    Shard,
    ShardEstimator,
    ShardingOption,
    Stats,
)

import shardwright as sw

TOPOLOGY = sw.Topology(2, "cpu")
SHARDERS = [EmbeddingBagCollectionSharder()]
NUM_TABLES = 4


def bags() -> sw.EmbeddingBagCollection:
    tables = [
        sw.EmbeddingBagConfig(
            num_embeddings=1000 * (number + 1),
            embedding_dim=64,
            name=f"t{number}",
            feature_names=[f"f{number}"],
        )
        for number in range(NUM_TABLES)
    ]
    return sw.EmbeddingBagCollection(tables, device="meta")


def planned(**arguments: Any) -> dict[str, sw.ParameterSharding]:
    planner = EmbeddingShardingPlanner(TOPOLOGY, 64, **{"debug": False, **arguments})
    return dict(planner.plan(bags(), SHARDERS).plan[""])


def options() -> list[ShardingOption]:
    constraints = {
        "*": sw.ParameterConstraints(
            sharding_types=["table_wise", "row_wise"], compute_kernels=["fused_torch"]
        )
    }
    return EmbeddingEnumerator(TOPOLOGY, 64, constraints).enumerate(bags(), SHARDERS)


def of_one_type(name: str) -> EmbeddingBagCollectionSharder:
    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [name]

    return Sharder()


@pytest.mark.parametrize(
    ("kib", "reason"),
    [(1_900, PlannerErrorType.INSUFFICIENT_STORAGE), (2_501, PlannerErrorType.STRICT_CONSTRAINTS)],
)
def test_planner_error_tells_too_little_memory_from_other_reasons(kib: int, reason: PlannerErrorType) -> None:
    topology = sw.Topology(1, "cpu", ddr_cap=kib * 1024)  # the weights are 2500 KiB
    planner = EmbeddingShardingPlanner(topology, 64, debug=False, storage_reservation=0.0)
    with pytest.raises(PlannerError, match="no plan") as caught:
        planner.plan(bags(), SHARDERS)
    assert caught.value.error_type is reason
    with pytest.raises(PlannerError):
        EmbeddingEnumerator(topology, 64).enumerate(bags(), SHARDERS)


def test_without_sharders_or_tables_there_is_nothing_to_plan() -> None:
    assert EmbeddingShardingPlanner(TOPOLOGY, 64, debug=False).plan(bags(), []) == sw.ShardingPlan({})
    assert EmbeddingEnumerator(TOPOLOGY, 64).enumerate(torch.nn.Linear(2, 2), SHARDERS) == []


def test_sharder_of_column_wise_alone_lists_narrow_tables_whole() -> None:
    constraints = {"*": sw.ParameterConstraints(min_partition=64)}
    found = EmbeddingEnumerator(TOPOLOGY, 64, constraints).enumerate(bags(), [of_one_type("column_wise")])
    assert {(option.name, option.num_shards) for option in found} == {
        (f"t{number}", 1) for number in range(NUM_TABLES)
    }


def test_enumerator_lists_options_with_torchrecs_costs() -> None:
    found = options()
    assert len(found) == 2 * NUM_TABLES
    rows, whole = sorted((option for option in found if option.name == "t1"), key=lambda o: o.sharding_type)
    assert [(shard.size, shard.offset) for shard in whole.shards] == [([2000, 64], [0, 0])]
    assert [(shard.size, shard.offset) for shard in rows.shards] == [
        ([1000, 64], [0, 0]),
        ([1000, 64], [1000, 0]),
    ]
    assert (whole.partition_by, rows.partition_by) == ("device", "uniform")
    assert whole.total_storage.ddr >= 2000 * 64 * 4
    assert 0 < whole.total_perf == whole.shards[0].perf.total
    assert whole.tensor.shape == (2000, 64)


def test_proposers_and_partitioners_by_hand_are_refused_with_the_argument_of_the_planner() -> None:
    with pytest.raises(
        sw.UnsupportedError, match=r"EmbeddingShardingPlanner\(proposer=UniformProposer\(\)\)"
    ):
        UniformProposer().load(options())
    with pytest.raises(sw.UnsupportedError, match=r"partitioner=MemoryBalancedPartitioner\(\)"):
        MemoryBalancedPartitioner().partition(options(), TOPOLOGY)


def test_change_of_a_proposer_or_partitioner_of_torchrecs_is_told_what_to_derive_from() -> None:
    class Own(GreedyProposer):
        pass

    class OwnPlaces(GreedyPerfPartitioner):
        pass

    with pytest.raises(sw.UnsupportedError, match=r"Own, which changes .* derives from .*types\.Proposer"):
        planned(proposer=Own())
    with pytest.raises(sw.UnsupportedError, match=r"OwnPlaces, which .* derives from .*types\.Partitioner"):
        planned(proposer=GreedyProposer(), partitioner=OwnPlaces())


def test_rating_is_the_time_of_the_slowest_rank() -> None:
    whole = [option for option in options() if option.sharding_type == "table_wise"]
    for number, option in enumerate(whole):
        option.shards[0].rank = min(number, 1)
    assert NoopPerfModel(TOPOLOGY).rate(whole) == sum(option.total_perf for option in whole[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        {"proposer": GreedyProposer(use_depth=False), "partitioner": GreedyPerfPartitioner(SortBy.PERF)},
        {"proposer": [UniformProposer(), GridSearchProposer(5)], "partitioner": MemoryBalancedPartitioner()},
        {"proposer": DynamicProgrammingProposer(10)},
        {
            "performance_model": NoopPerfModel(TOPOLOGY),
            "storage_reservation": HeuristicalStorageReservation(0.1),
        },
        {"enumerator": EmbeddingEnumerator(TOPOLOGY, 64), "timeout_seconds": 20},
    ],
    ids=["one of each", "several", "bins", "ratings", "enumerator"],
)
def test_planner_takes_torchrecs_parts(arguments: dict[str, Any]) -> None:
    assert sorted(planned(**arguments)) == [f"t{number}" for number in range(NUM_TABLES)]


class LastOption(Proposer):
    """A script's proposer: the last option of each table, once."""

    def load(self, search_space: list[ShardingOption], enumerator: object = None) -> None:
        self.proposal: list[ShardingOption] | None = list(
            {option.fqn: option for option in search_space}.values()
        )
        self.told: list[tuple[bool, float | None]] = []

    def propose(self) -> list[ShardingOption] | None:
        return self.proposal

    def feedback(
        self,
        partitionable: bool,
        plan: object = None,
        perf_rating: float | None = None,
        storage_constraint: object = None,
    ) -> None:
        self.proposal = None
        self.told.append((partitionable, perf_rating))


def test_planner_takes_a_scripts_proposer_and_tells_it_what_became_of_proposals() -> None:
    proposer = LastOption()
    enumerator = EmbeddingEnumerator(TOPOLOGY, 64)
    last = {option.name: option for option in enumerator.enumerate(bags(), SHARDERS)}
    plan = planned(proposer=proposer, enumerator=enumerator)
    assert {name: (sharding.sharding_type, sharding.compute_kernel) for name, sharding in plan.items()} == {
        name: (option.sharding_type, option.compute_kernel) for name, option in last.items()
    }
    ((fits, rating),) = proposer.told
    assert fits
    assert rating is not None
    assert rating > 0


class HalfAProposer(LastOption):
    def propose(self) -> list[ShardingOption] | None:
        return self.proposal and self.proposal[:1]


def test_planner_refuses_a_proposal_that_leaves_out_tables() -> None:
    with pytest.raises(
        sw.PlanningError, match=r"HalfAProposer\.propose\(\) must give one option.* each of 4 tables"
    ):
        planned(proposer=HalfAProposer())


class AllOnRankOne(Partitioner):
    """A script's partitioner."""

    def partition(self, proposal: list[ShardingOption], storage_constraint: Any) -> list[ShardingOption]:
        assert storage_constraint.world_size == 2
        for option in proposal:
            for shard in option.shards:
                shard.rank = 1 if shard.rank is None else shard.rank
        return proposal


def test_planner_takes_a_scripts_partitioner() -> None:
    constraints = {"*": sw.ParameterConstraints(sharding_types=["table_wise"])}
    plan = planned(partitioner=AllOnRankOne(), proposer=GreedyProposer(), constraints=constraints)
    assert {tuple(sharding.ranks) for sharding in plan.values()} == {(1,)}


class NoRoom(Partitioner):
    def partition(self, proposal: list[ShardingOption], storage_constraint: Any) -> list[ShardingOption]:
        raise PlannerError("no room")


def test_planner_whose_partitioner_finds_no_room_says_that_there_is_no_plan() -> None:
    constraints = {"*": sw.ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(sw.PlanningError):
        planned(partitioner=NoRoom(), proposer=LastOption(), constraints=constraints)


class RowsAreFree(ShardEstimator):
    """A script's estimator: row-wise takes no time, anything else does."""

    def __init__(self, topology: sw.Topology, constraints: object = None) -> None: ...

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: object = None) -> None:
        for option in sharding_options:
            for shard in option.shards:
                shard.perf = Perf(0.0 if option.sharding_type == "row_wise" else 5.0, 0.0, 0.0, 0.0)


class TimesTen(EmbeddingPerfEstimator):
    """A script's refinement of TorchRec's estimator."""

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: object = None) -> None:
        super().estimate(sharding_options)
        for shard in (shard for option in sharding_options for shard in option.shards):
            shard.perf = Perf(10 * shard.perf.total, 0.0, 0.0, 0.0)  # type: ignore[union-attr]


def test_planner_takes_a_scripts_estimator() -> None:
    enumerator = EmbeddingEnumerator(
        TOPOLOGY, 64, estimator=[RowsAreFree(TOPOLOGY), EmbeddingStorageEstimator(TOPOLOGY)]
    )
    assert {sharding.sharding_type for sharding in planned(enumerator=enumerator).values()} == {"row_wise"}


def test_estimator_that_derives_from_torchrecs_has_its_times() -> None:
    plain, refined = (
        EmbeddingEnumerator(TOPOLOGY, 64, estimator=kind(TOPOLOGY)).enumerate(bags(), SHARDERS)
        for kind in (EmbeddingPerfEstimator, TimesTen)
    )
    assert [option.total_perf for option in refined] == pytest.approx([10 * o.total_perf for o in plain])
    assert [option.total_storage for option in refined] == [option.total_storage for option in plain]


class Told(Stats):
    def log(self, **told: Any) -> None:  # type: ignore[override]
        self.told = told


def test_stats_are_told_the_plan_with_its_options() -> None:
    stats = Told()
    plan = planned(stats=stats, constraints={"t0": sw.ParameterConstraints(sharding_types=["row_wise"])})
    best = {option.name: option for option in stats.told["best_plan"]}
    assert {name: [shard.rank for shard in option.shards] for name, option in best.items()} == {
        name: sharding.ranks for name, sharding in plan.items()
    }
    assert stats.told["num_proposals"] >= stats.told["num_plans"] >= 1


def test_reservations_are_sums_of_torchrecs_parts() -> None:
    def fields(*values: float) -> dict[str, float]:
        return dict(zip(("part", "fixed_bytes", "dense_multiplier", "id_copies"), values, strict=True))

    assert FixedPercentageStorageReservation(0.1).to_data() == 0.1
    assert HeuristicalStorageReservation(percentage=0.1).to_data() == fields(0.1, 0, 6.0, 20)
    estimated = HeuristicalStorageReservation(0.1, dense_tensor_estimate=7)
    assert estimated.to_data() == fields(0.1, 7, 0.0, 20)
    assert InferenceStorageReservation(0.1).to_data() == fields(0.1, 0, 1.0, 1)
    assert InferenceStorageReservation(0.1, 7).to_data() == fields(0.1, 7, 0.0, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"performance_model": NoopStorageModel(TOPOLOGY)}, "performance_model=NoopStorageModel.*objective"),
        ({"callbacks": [list]}, "callbacks is not supported"),
        ({"plan_loader": object()}, "plan_loader is not supported"),
        ({"partitioner": None, "enumerator": type("Own", (EmbeddingEnumerator,), {"enumerate": None})(TOPOLOGY, 1)},
         "enumerator=Own.*ShardingType"),
    ],
    ids=["rating", "callbacks", "loader", "enumerator"],
)  # fmt: skip
def test_planner_refuses_what_it_cannot_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(sw.UnsupportedError, match=named):
        planned(**arguments)


def test_estimator_of_an_option_made_by_hand_is_an_error() -> None:
    option = ShardingOption(
        "t", None, ("", None), [1.0], 1, "table_wise", "device", "fused", [Shard([1, 1], [0, 0])]
    )
    with pytest.raises(sw.UnsupportedError, match="made by hand"):
        EmbeddingPerfEstimator(TOPOLOGY).estimate([option])
