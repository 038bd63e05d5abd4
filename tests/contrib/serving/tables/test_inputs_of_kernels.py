"""Kernels take the batches that plain torch takes, refuse those it refuses, and hold the rows that they can read."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import shardwright_serving as serving
import torch

import shardwright as sw
from shardwright import _fbgemm

TABLES = [("a", 11, 8, ["f", "g"]), ("b", 7, 12, ["f"])]
KERNELS = [None, "quant_numba", "quant_torch"]


def quantized(pooling: str, precision: str = "INT8") -> Any:
    torch.manual_seed(3)
    common: list[Any] = [
        {"name": name, "num_embeddings": rows, "embedding_dim": dim, "feature_names": features}
        for name, rows, dim, features in TABLES
    ]
    if pooling == "NONE":
        tables = [sw.EmbeddingConfig(**one) for one in common]
        return serving.quantize_embeddings(sw.EmbeddingCollection(tables), precision)
    bags = [sw.EmbeddingBagConfig(pooling=pooling, **one) for one in common]
    return serving.quantize_embeddings(sw.EmbeddingBagCollection(bags), precision)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "NONE"])
def test_batch_of_no_samples_has_outputs_of_no_rows(pooling: str, kernel: str | None) -> None:
    model = quantized(pooling)
    model.use_kernel(kernel)
    found = model(sw.KeyedJaggedTensor.from_lists({"f": [], "g": []}))
    if pooling == "NONE":
        assert [jagged.values().shape for jagged in found.values()] == [(0, 8), (0, 8), (0, 12)]
    else:
        assert found.values().shape == (0, 28)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "NONE"])
@pytest.mark.parametrize("keys", [["f", "g"], ["g", "f"], ["f", "g", "x"]])
def test_lengths_that_do_not_add_up_raise(pooling: str, keys: list[str], kernel: str | None) -> None:
    model = quantized(pooling)
    model.use_kernel(kernel)
    for last in (0, 9):
        lengths = torch.tensor([1] * (2 * len(keys) - 1) + [last])
        ids = torch.zeros(2 * len(keys), dtype=torch.int64)
        with pytest.raises(
            sw.InvalidInputError,
            match=r"add up to|is 9, but there are",
        ):
            model(sw.KeyedJaggedTensor(keys, ids, lengths=lengths))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.float32])
def test_ids_of_other_types_raise_as_those_of_float_tables(dtype: torch.dtype) -> None:
    lengths = torch.tensor([1, 0, 1, 0])
    features = sw.KeyedJaggedTensor(["f", "g"], torch.zeros(2).to(dtype), lengths=lengths)
    with pytest.raises(sw.InvalidInputError, match=r"ids are int32 or int64. Convert: .long\(\)"):
        quantized("SUM")(features)


@pytest.mark.parametrize("precision", ["FP16", "INT8"])
def test_kernel_that_trains_reads_rows_of_float16_and_no_packed_ones(precision: str) -> None:
    model = quantized("SUM", precision)
    rule = sw.ParameterConstraints(compute_kernels=["dense"], sharding_types=["row_wise"])
    planner = sw.EmbeddingShardingPlanner(sw.Topology(1, "cpu"), constraints={"*": rule})
    sharders = [serving.QuantEmbeddingBagCollectionSharder()]
    if precision != "FP16":
        with pytest.raises(
            sw.UnsupportedError, match="'dense' cannot look these tables up: it reads no rows"
        ):
            model.use_kernel("dense")
        with pytest.raises(sw.PlanningError, match="'dense': it reads no rows of INT8"):
            planner.plan(model, sharders)
        return
    batch = sw.KeyedJaggedTensor.from_lists({"f": [[1, 2], []], "g": [[], [3]]})
    wanted = model(batch).values()
    sharded = sw.DistributedModelParallel(
        model, env=sw.ShardingEnv.local(), plan=planner.plan(model, sharders), sharders=sharders
    )
    torch.testing.assert_close(sharded(batch).values(), wanted)
    model.use_kernel("dense")
    torch.testing.assert_close(model(batch).values(), wanted)


@pytest.mark.parametrize("precision", ["FP16", "FP8"])
def test_planned_and_served_without_numba_and_fbgemm(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fbgemm, "_failure", lambda: "ImportError: not installed")
    for absent in ("numba", "fbgemm_gpu"):
        monkeypatch.setitem(sys.modules, absent, None)
    model = quantized("SUM", precision)
    batch = sw.KeyedJaggedTensor.from_lists({"f": [[1, 2], []], "g": [[], [3]]})
    sharded = sw.DistributedModelParallel(model, env=sw.ShardingEnv.local())
    if precision == "FP8":  # float16 is read by kernels that train, too
        assert {own.compute_kernel for own in sharded.plan.plan[""].values()} == {"quant_torch"}
    with torch.no_grad():
        assert torch.equal(sharded(batch).values(), model(batch).values())


def shared_model() -> torch.nn.Module:
    """A model with one collection under two names, one of them in a module that is shared too."""
    table = sw.EmbeddingBagConfig(name="a", num_embeddings=11, embedding_dim=8, feature_names=["f"])
    tower = torch.nn.Sequential(sw.EmbeddingBagCollection([table]))
    return torch.nn.ModuleDict({"one": tower, "two": tower, "bags": tower[0]})


def bags_of(model: Any) -> list[torch.nn.Module]:
    return [model["one"][0], model["two"][0], model["bags"]]


@pytest.mark.parametrize("inplace", [False, True])
def test_collection_under_several_names_is_quantized_and_cut_under_each(inplace: bool) -> None:
    model = shared_model()
    result = serving.quantize_embeddings(model, inplace=inplace)
    assert (result is model) == inplace
    made = bags_of(result)
    assert isinstance(made[0], serving.QuantEmbeddingBagCollection)
    assert made[0] is made[1] is made[2]
    plan = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu")).plan(
        result, [serving.QuantEmbeddingBagCollectionSharder()]
    )
    cut = bags_of(serving.shard_for_serving(result, plan, inplace=inplace))
    assert cut[0] is cut[1] is cut[2]
    assert not isinstance(cut[0], serving.QuantEmbeddingBagCollection)
    if inplace:
        assert bags_of(model) == cut


@pytest.mark.parametrize("pooling", ["MEAN", "NONE"])
def test_compiled_model_gives_what_the_model_gives(pooling: str) -> None:
    model = torch.nn.Sequential(quantized(pooling))
    compiled = torch.compile(model, backend="eager")
    for lists in ([[1, 2], []], [[3], [4], []]):
        batch = sw.KeyedJaggedTensor.from_lists({"f": lists, "g": lists[::-1]})
        found, wanted = compiled(batch), model(batch)
        if pooling == "NONE":
            assert all(torch.equal(found[name].values(), wanted[name].values()) for name in wanted)
        else:
            assert torch.equal(found.values(), wanted.values())
