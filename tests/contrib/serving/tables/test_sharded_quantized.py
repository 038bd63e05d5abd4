"""Sharded quantized collections equal the unsharded one: to the last bit wherever rows are whole on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardwright_serving as serving
import torch
from attrs import evolve
from shardwright_serving.kernels._numba_lookup import QuantNumbaLookup
from shardwright_serving.kernels._torch_lookup import QuantTorchLookup
from tests.contrib.serving.tables import quantized_tables
from tests.errors import raises
from tests.pairs import in_turns

import shardwright as sw
from shardwright_testing import run_simulated

KINDS = [
    "table_wise",
    "column_wise",
    "table_column_wise",
    "data_parallel",
    "row_wise",
    "table_row_wise",
    "grid_shard",
]
FORMS = [("SUM", False), ("MEAN", False), ("SUM", True), ("NONE", False)]
"""Pooling, and whether ids have weights."""
PARTIAL = {"row_wise", "table_row_wise", "grid_shard"}
"""Types whose ranks send partial sums, which are added up in another order."""


def outputs(found: Any) -> torch.Tensor:
    return quantized_tables.outputs(found.wait() if isinstance(found, sw.LazyAwaitable) else found)


def collection(pooling: str, *, is_weighted: bool = False) -> Any:
    return quantized_tables.tables_of(
        pooling, (32, 32, 16), (23, 16, 5), is_weighted=is_weighted, need_indices=True
    )


def batch(rank: int) -> sw.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    size = 4 + rank
    lengths = torch.randint(0, 7, (3, size), generator=generator)
    ids = [
        torch.randint(most, (int(own.sum()),), generator=generator)
        for most, own in zip((16, 23, 5), lengths, strict=True)
    ]
    values = torch.cat(ids)
    weights = torch.rand(len(values), generator=generator)
    return sw.KeyedJaggedTensor(["f", "g", "h"], values, weights, lengths.flatten().int())


def plan_of(model: Any, kind: str, world_size: int, kernel: str) -> sw.ShardingPlan:
    """A plan of each table by one sharding type, blocks dealt to ranks in turn."""
    topology = sw.Topology(world_size=world_size, local_world_size=min(2, world_size), compute_device="cpu")
    rules = {"*": sw.ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel], min_partition=4)}
    planner = sw.EmbeddingShardingPlanner(topology=topology, constraints=rules)
    return planner.plan(model, sharders_of())


def sharders_of() -> list[Any]:
    return [serving.QuantEmbeddingBagCollectionSharder(), serving.QuantEmbeddingCollectionSharder()]


def sharded(env: sw.ShardingEnv, model: Any, plan: sw.ShardingPlan) -> Any:
    import copy

    return sw.DistributedModelParallel(copy.deepcopy(model), env=env, plan=plan, device="cpu")


def quantized_of(pooling: str, is_weighted: bool) -> Any:
    """A collection with three precisions."""
    floats = collection(pooling, is_weighted=is_weighted)
    return serving.quantize_embeddings(floats, "INT8", per_table={"b": "INT4", "c": "FP8"})


def tolerance_of(kind: str, pooling: str) -> float:
    """How far sharded outputs may be from unsharded ones: partial sums are added up in another order."""
    return 2e-6 if kind in PARTIAL and pooling != "NONE" else 0.0


@pytest.mark.parametrize(("form", "kind"), in_turns(FORMS, KINDS))
@pytest.mark.parametrize("kernel", ["quant_numba", pytest.param("quant_torch", marks=pytest.mark.slow)])
def test_sharded_equals_unsharded(kind: str, form: tuple[str, bool], kernel: str) -> None:
    quantized, tolerance = quantized_of(*form), tolerance_of(kind, form[0])
    plan = plan_of(torch.nn.Sequential(quantized), kind, 4, kernel)
    assert {own.sharding_type for own in plan.plan["0"].values()} == {kind}

    def on_rank(env: sw.ShardingEnv) -> None:
        model = sharded(env, torch.nn.Sequential(quantized), plan)
        with torch.no_grad():
            found = outputs(model(batch(env.rank)))
        wanted = outputs(quantized(batch(env.rank)))
        assert not found.requires_grad
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)

    run_simulated(on_rank, 4, local_world_size=2)


@pytest.mark.parametrize("kind", ["column_wise", "row_wise", "data_parallel"])
@pytest.mark.parametrize("precision", ["INT8", "INT4", "INT2", "FP8", "FP16"])
def test_state_dict_is_the_unsharded_ones_and_loads(kind: str, precision: str) -> None:
    quantized = serving.quantize_embeddings(collection("SUM"), precision, output_dtype="FP16")
    plan = plan_of(torch.nn.Sequential(quantized), kind, 2, "quant_torch")
    wanted = torch.nn.Sequential(quantized).state_dict()

    def on_rank(env: sw.ShardingEnv) -> None:
        model = sharded(env, torch.nn.Sequential(quantized), plan)
        found = model.full_state_dict()
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        empty = sharded(env, torch.nn.Sequential(type(quantized)(quantized.tables, device="meta")), plan)
        with torch.no_grad():
            # Floats are drawn, others stay zeros.
            assert bool(outputs(empty(batch(env.rank))).any()) == (precision == "FP16")
            empty.load_state_dict(wanted)
            assert torch.equal(outputs(empty(batch(env.rank))).half(), outputs(model(batch(env.rank))))
        assert outputs(model(batch(env.rank))).dtype == torch.float16
        alone = model.module[0].unshard()
        assert isinstance(alone, serving.QuantEmbeddingBagCollection)
        assert torch.equal(outputs(alone(batch(3))), outputs(quantized(batch(3))))
        assert not any(parameter.requires_grad for parameter in model.parameters())

    run_simulated(on_rank, 2)


def test_what_sharded_quantized_collections_do_not_do_raises(tmp_path: Path) -> None:
    quantized = serving.quantize_embeddings(collection("SUM"))
    plan = plan_of(torch.nn.Sequential(quantized), "table_wise", 1, "quant_torch")
    model = sharded(sw.ShardingEnv.local(device_type="cpu"), torch.nn.Sequential(quantized), plan)
    with pytest.raises(sw.UnsupportedError, match="rows of INT8 are not saved in blocks"):
        sw.save_checkpoint(tmp_path, model)
    moved = plan_of(torch.nn.Sequential(quantized), "table_wise", 1, "quant_numba")
    with pytest.raises(sw.UnsupportedError, match="rows of INT8 do not move between plans"):
        model.reshard(moved)
    assert not model.reshard(plan).tables
    with pytest.raises(RuntimeError, match=r"is torch.uint8 \[1, 1\], not torch.uint8 \[23, 36\]"):
        model.load_state_dict(
            {**model.full_state_dict(), "0.embedding_bags.a.weight": torch.zeros(1, 1, dtype=torch.uint8)}
        )
    wrong = sw.KeyedJaggedTensor.from_lists({"f": [[16]], "g": [[1]], "h": [[1]]})
    with pytest.raises(sw.InvalidInputError, match="16"):
        outputs(model(wrong))


@pytest.mark.parametrize(("form", "kind"), in_turns(FORMS[::-1], KINDS))
def test_all_shards_in_one_process_equal_unsharded(kind: str, form: tuple[str, bool]) -> None:
    quantized, tolerance = quantized_of(*form), tolerance_of(kind, form[0])
    model = torch.nn.Sequential(quantized)
    plan = plan_of(model, kind, 4, "quant_torch")
    served = serving.shard_for_serving(model, plan, devices=["cpu", "cpu:0", "cpu", "cpu:0"])
    for number in range(2):
        found, wanted = outputs(served(batch(number))), outputs(model(batch(number)))
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    if kind == "row_wise":
        assert [own.num_rows for own in served[0].blocks_of("a")] == [6, 6, 6, 5]
    assert isinstance(model[0], serving.QuantEmbeddingBagCollection | serving.QuantEmbeddingCollection)


def test_one_process_looks_each_table_up_by_the_kernel_that_the_plan_names() -> None:
    model = torch.nn.Sequential(serving.quantize_embeddings(collection("SUM")))
    params = plan_of(model, "table_wise", 1, "quant_numba").plan["0"]

    def served(kernel: str) -> Any:
        own = {**params, "a": evolve(params["a"], compute_kernel=kernel)}
        return serving.shard_for_serving(
            model, sw.ShardingPlan({"0": sw.EmbeddingModuleShardingPlan(own)}), devices=["cpu"]
        )

    lookups = [type(group.lookup) for group in served("quant_torch")[0].shards[0]._kernel_lookups()._groups]
    assert lookups == [QuantTorchLookup, QuantNumbaLookup]
    assert len(served("")[0].shards[0]._kernel_lookups()._groups) == 1  # the preferred
    with pytest.raises(sw.UnknownPluginError, match="quant_turch"):
        served("quant_turch")
    with pytest.raises(sw.UnsupportedError, match="'dense' cannot look these tables up"):
        served("dense")


@pytest.mark.parametrize(
    ("part", "devices", "error", "text"),
    [
        ("", ["cpu", "cpu:0"], sw.InvalidInputError, "is planned for 4 ranks, and there are 2 devices"),
        ("0", None, sw.InvalidInputError, "the plan has nothing for the QuantEmbeddingBagCollection at ''"),
        ("", [], sw.InvalidInputError, "there are no devices: give one for each rank"),
        ("", ["gpu"], sw.InvalidInputError, r"devices are \['gpu'\]"),
    ],
)
def test_what_cannot_be_cut_for_one_process_raises(
    part: str, devices: list[str] | None, error: type[Exception], text: str
) -> None:
    model = torch.nn.Sequential(serving.quantize_embeddings(collection("SUM")))
    plan = plan_of(model, "row_wise", 4, "quant_torch")
    with pytest.raises(error, match=text):
        serving.shard_for_serving(model.get_submodule(part), plan, devices=devices)


def test_cut_model_is_not_cut_again_and_names_the_row_that_is_not_there() -> None:
    model = torch.nn.Sequential(serving.quantize_embeddings(collection("SUM")))
    plan = plan_of(model, "row_wise", 4, "quant_torch")
    with pytest.raises(sw.InvalidInputError, match=r"no quantized collection to cut: quantize_embeddings"):
        serving.shard_for_serving(collection("SUM"), plan)
    cut = serving.shard_for_serving(model, plan)
    with pytest.raises(sw.UnsupportedError, match="is cut already"):
        serving.shard_for_serving(cut, plan)
    wrong = sw.KeyedJaggedTensor.from_lists({"f": [[16]], "g": [[1]], "h": [[1]]})
    with pytest.raises(sw.InvalidInputError, match=r"feature 'f': id 16 .* is no row of table 'b'"):
        cut(wrong)


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_other_rows_on_one_rank_are_refused_or_the_first_ranks(kind: str) -> None:
    own, other = (serving.quantize_embeddings(collection("SUM"), "INT8") for _ in range(2))
    other.quantized_rows("b").stored[3, -1] ^= 1
    plan = plan_of(torch.nn.Sequential(own), kind, 2, "quant_torch")

    def built(env: sw.ShardingEnv, *, sync: bool) -> Any:
        model = torch.nn.Sequential((own, other)[env.rank])
        return sw.DistributedModelParallel(model, env=env, plan=plan, device="cpu", sync_module_states=sync)

    with pytest.raises(
        sw.errors.DistributedError,
        match=r"table 'b' is rank 0: checksum .*; rank 1: checksum .* .1 of 3 differ",
    ):
        run_simulated(lambda env: built(env, sync=False), 2)
    expected = dict(torch.nn.Sequential(own).state_dict())
    for state in run_simulated(lambda env: built(env, sync=True).full_state_dict(), 2):
        assert all(torch.equal(state[name], rows) for name, rows in expected.items())


@pytest.mark.parametrize("pooling", ["SUM", "NONE"])
@pytest.mark.parametrize(
    ("asked", "fused_params"), [("optimizer", {"optimizer": "adam"}), ("max_gradient", {"max_gradient": 1.0})]
)
def test_sharder_refuses_what_is_for_training(pooling: str, asked: str, fused_params: dict[str, Any]) -> None:
    model = torch.nn.ModuleDict({"own": serving.quantize_embeddings(collection(pooling))})
    planner = sw.EmbeddingShardingPlanner(sw.Topology(1, "cpu"), objective="serving")
    kind = type(next(own for own in sharders_of() if own.module_type is type(model["own"])))
    with raises(sw.UnsupportedError, subject="own", asked=asked):
        planner.plan(model, [kind(fused_params)])
    planner.plan(model, [kind({"cache_load_factor": 0.5})])
