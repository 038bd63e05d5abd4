"""Times fitted to measurements: the estimator, its file, its regressors, and how it is measured."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from shardwright_learned import LearnedEstimator, Measurement
from shardwright_learned.features import FEATURES
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from tests.contrib import distributions, learned_workers

import shardwright as sw
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.tables.constraints import Constraints
from shardwright_testing import EstimatorTests
from shardwright_testing.ranks import RankPool

KERNEL, TYPES = "fused_torch", ("table_wise", "row_wise", "data_parallel")
MS_A_BYTE = {"forward_compute": 2e-6, "forward_communication": 1e-6, "backward_compute": 5e-6}
TOPOLOGY = sw.Topology(world_size=4, compute_device="cpu", local_world_size=2)


def milliseconds(features: dict[str, float]) -> dict[str, float]:
    """A law that a linear regressor can learn exactly."""
    moved = features["read_bytes"] + features["exchanged_bytes"] + 3 * features["synchronised_bytes"]
    return {phase: 0.01 + slope * moved for phase, slope in MS_A_BYTE.items()}


def drawn_measurements(count: int = 30, kernel: str = KERNEL) -> list[Measurement]:
    generator, found = np.random.default_rng(3), []
    for index in range(count):
        features = dict(zip(FEATURES, (10 ** generator.uniform(2, 7, len(FEATURES))).tolist(), strict=True))
        found.append(Measurement(kernel, TYPES[index % len(TYPES)], features, milliseconds(features)))
    return found


class TestLearnedEstimator(EstimatorTests):
    @pytest.fixture
    def estimator(self) -> sw.Estimator:
        return LearnedEstimator.fit([*drawn_measurements(), *drawn_measurements(20, "dense")])


def tables() -> list[sw.TableSpec]:
    return [
        sw.TableSpec(f"t{i}", num_embeddings=1000 * (i + 1), embedding_dim=16 * (i % 3 + 1)) for i in range(5)
    ]


def plan_with(estimator: Any, **rules: Any) -> tuple[sw.ShardingPlan, Any]:
    constraints = {"*": sw.ParameterConstraints(**rules)} if rules else None
    planner = sw.EmbeddingShardingPlanner(TOPOLOGY, 64, estimator=estimator, constraints=constraints)
    return planner.plan_tables(tables()), planner.report


def test_learned_estimates_follow_the_law_they_were_fitted_to() -> None:
    _, report = plan_with(LearnedEstimator.fit(drawn_measurements()), sharding_types=["table_wise"])
    expected = {}
    for table in tables():
        bags = 64 * TOPOLOGY.world_size  # a rank with the whole table serves all ranks' bags, one id each
        vector_bytes = bags * table.embedding_dim * 4
        expected[table.name] = 3 * 0.01 + sum(MS_A_BYTE.values()) * vector_bytes * (1 + 3 / 4)
    told = {table["path"]: table["time_ms"] for table in report.tables}
    assert told == pytest.approx(expected, rel=1e-6)


def test_learned_lookups_and_updates_of_ranks_of_half_the_speed_take_twice_as_long() -> None:
    measurements = drawn_measurements()
    learned, slow = LearnedEstimator.fit(measurements), TOPOLOGY.evolved(speeds=(0.5,) * 4)
    rule = sw.ParameterConstraints(sharding_types=[*TYPES], compute_kernels=[KERNEL])
    options = enumerate_options(tables(), TOPOLOGY, Constraints({"*": rule}), sw.host.host(), batch_size=64)
    times, of_slow = (learned.estimate(options, topology) for topology in (TOPOLOGY, slow))
    for phase, column in times.items():
        np.testing.assert_allclose(of_slow[phase], column * (2 if phase.endswith("_compute") else 1))
    whole = [attrs.evolve(one, milliseconds={"forward": 1.0, "backward": 2.0}) for one in measurements]
    with pytest.raises(sw.UnsupportedError, match=r"speed 0\.5.*phases backward, forward, none of which"):
        LearnedEstimator.fit(whole).estimate(options, slow)


def test_learned_offers_what_was_measured_and_refuses_a_kernel_that_was_not() -> None:
    estimator = LearnedEstimator.fit([one for one in drawn_measurements() if one.sharding_type == "row_wise"])
    plan, _ = plan_with(estimator)
    assert {sharding.sharding_type for sharding in plan.plan[""].values()} == {"row_wise"}
    assert {sharding.compute_kernel for sharding in plan.plan[""].values()} == {KERNEL}
    plan, _ = plan_with(
        estimator, sharding_types=["table_wise"], compute_kernels=[KERNEL]
    )  # asked for by name
    assert {sharding.sharding_type for sharding in plan.plan[""].values()} == {"table_wise"}
    with pytest.raises(sw.UnsupportedError, match=r"no measurements of dense; it has them of fused_torch"):
        plan_with(estimator, sharding_types=["table_wise"], compute_kernels=["dense"])


def test_learned_by_name_reads_the_file_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = sw.host.PluginHost(entry_points=[*_installed(), *distributions.entry_points("learned_estimator")])
    with sw.host.use_host(host):
        monkeypatch.delenv("LEARNED_COSTS_FILE", raising=False)
        with pytest.raises(
            sw.InvalidInputError, match=r"estimator=LearnedEstimator.load.*LEARNED_COSTS_FILE"
        ):
            plan_with("learned")
        estimator = LearnedEstimator.fit(drawn_measurements())
        estimator.save(tmp_path / "costs.json")
        monkeypatch.setenv("LEARNED_COSTS_FILE", str(tmp_path / "costs.json"))
        assert plan_with("learned")[0] == plan_with(estimator)[0]


def _installed() -> Sequence[Any]:
    from importlib.metadata import entry_points

    return list(entry_points(group="shardwright"))


def test_learned_planning_changes_nothing() -> None:
    plan_with(None)
    with distributions.nothing_changes():
        plan_with(LearnedEstimator.fit(drawn_measurements()))


REGRESSORS = [
    None,
    RandomForestRegressor(n_estimators=5, random_state=0),
    HistGradientBoostingRegressor(max_iter=5, monotonic_cst=[1] * len(FEATURES)),
    make_pipeline(FunctionTransformer(lambda bytes_: np.log1p(bytes_)), StandardScaler(), Ridge(alpha=0.5)),
    TransformedTargetRegressor(LinearRegression(), func=np.log1p, inverse_func=np.expm1),
]


@pytest.mark.parametrize("regressor", REGRESSORS, ids=lambda one: type(one).__name__)
def test_learned_file_gives_the_same_estimates(regressor: Any, tmp_path: Path) -> None:
    estimator = LearnedEstimator.fit(drawn_measurements(), regressor)
    estimator.save(tmp_path / "costs.json")
    loaded = LearnedEstimator.load(tmp_path / "costs.json", regressor)
    assert loaded.model.measurements == estimator.model.measurements
    matrix = 10 ** np.random.default_rng(7).uniform(2, 7, (50, len(FEATURES)))
    for phase in estimator.model.phases:
        expected = estimator.model.predict(KERNEL, phase, matrix)
        np.testing.assert_allclose(loaded.model.predict(KERNEL, phase, matrix), expected, rtol=1e-9)
    assert plan_with(loaded)[0] == plan_with(estimator)[0]


def test_fit_what_is_no_regressor_is_refused() -> None:
    with pytest.raises(sw.InvalidInputError, match="must be one of scikit-learn's, got 'ridge'"):
        LearnedEstimator.fit(drawn_measurements(), "ridge")


def damaged(**changes: Any) -> str:
    data = json.loads(LearnedEstimator.fit(drawn_measurements()).model.to_json())
    return json.dumps({**data, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "no file of learned costs"),
        (damaged(version=1), "no file of learned costs"),
        (damaged(measurements="none"), "no usable measurements"),
        (damaged(measurements=[{"a": 1}]), "a measurement is an object with"),
        (damaged(measurements=[]), "no measurements to fit"),
    ],
)
def test_load_a_damaged_file_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(sw.InvalidInputError, match=message):
        LearnedEstimator.load(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("features", "times", "message"),
    [
        ({"read_bytes": 1.0}, {"step": 1.0}, "measure again"),
        (dict.fromkeys(FEATURES, -1.0), {"step": 1.0}, "not negative"),
        (dict.fromkeys(FEATURES, 1.0), {"step": math.nan}, "finite"),
        (dict.fromkeys(FEATURES, 1.0), {}, "got none"),
    ],
)
def test_measurement_wrong_numbers_are_refused(
    features: dict[str, float], times: dict[str, float], message: str
) -> None:
    with pytest.raises(sw.InvalidInputError, match=message):
        Measurement(KERNEL, "row_wise", features, times)


def test_fit_phases_that_differ_are_refused() -> None:
    one = drawn_measurements(1)[0]
    other = Measurement(KERNEL, "row_wise", one.features, {"step": 1.0})
    with pytest.raises(sw.InvalidInputError, match="different phases"):
        LearnedEstimator.fit([one, other])


def test_no_file_imports_pickle() -> None:
    for path in distributions.sources("learned_estimator"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            assert not {"pickle", "joblib", "dill", "marshal"} & {*names, getattr(node, "module", None)}


@pytest.mark.distributed
@pytest.mark.slow
def test_measure_on_real_ranks_gives_costs_to_plan_with() -> None:
    with RankPool(2, backend="gloo") as pool:
        results = pool.run(learned_workers.measure_and_plan, 2)
    (measured, plan, types), (others, other_plan, _) = results
    assert (measured, plan) == (others, other_plan)
    assert [(one["sharding_type"], one["compute_kernel"]) for one in measured] == [
        ("table_wise", KERNEL),
        ("row_wise", KERNEL),
    ] * 3
    for one, (rows, dim) in zip(measured[::2], ((64, 8), (640, 16), (6400, 32)), strict=True):
        assert one["features"]["table_bytes"] == rows * dim * 4
        assert one["features"]["read_bytes"] == 2 * 4 * 2 * dim * 4  # 2 ranks x 4 bags x 2 ids
        assert one["features"]["output_bytes"] == 2 * 4 * dim * 4
        assert {"forward_communication", "backward_communication"} < one["milliseconds"].keys()
        assert min(one["milliseconds"][phase] for phase in ("forward_compute", "backward_compute")) > 0
    assert [one["features"]["table_bytes"] for one in measured[1::2]] == [
        one["features"]["table_bytes"] / 2 for one in measured[::2]
    ]
    assert set(types.values()) <= {"table_wise", "row_wise"}
