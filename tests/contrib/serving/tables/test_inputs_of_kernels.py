"""Kernels take the batches that plain torch takes; ids that have no row give zeros, whatever looks the others up."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import shardwright_serving as serving
import torch
from shardwright_serving import QuantizedRows
from tests.contrib.serving.scripting.test_quantized_scripts import Pooled
from tests.contrib.serving.tables.test_sharded_quantized import batch, collection, outputs, plan_of

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


def without(module: Any, kept: torch.Tensor) -> Any:
    """The quantized collection, in which all rows but some of table ``c`` are zeros."""
    whole = serving.quantize_embeddings(module, "INT8")
    rows = whole.quantized_rows("c")
    stored = torch.zeros_like(rows.packed())
    stored[kept] = rows.packed()[kept]
    whole.set_rows("c", QuantizedRows(rows.data_type, rows.num_columns, stored))
    return whole


@pytest.mark.parametrize("kept", [torch.tensor([3, 0]), torch.tensor([], dtype=torch.int64), torch.arange(5)])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_pruned_ids_give_zeros(pooling: str, kept: torch.Tensor) -> None:
    module = collection(pooling)
    pruned = serving.quantize_embeddings(torch.nn.Sequential(module), "INT8", ids={"c": kept})
    assert pruned[0].collection.quantized_rows("c").num_rows == len(kept) + 1
    wanted = outputs(without(module, kept)(batch(1)))
    assert torch.equal(outputs(pruned(batch(1))), wanted)
    found = serving.shard_for_serving(pruned, plan_of(pruned, "column_wise", 2, "quant_torch"))
    assert torch.equal(outputs(found(batch(1))), wanted)


def test_pruned_tables_have_what_collections_have() -> None:
    pruned = serving.quantize_embeddings(collection("SUM"), "INT4", ids={"c": [1, 2]})
    whole: Any = serving.quantize_embeddings(collection("SUM"), "INT4")
    model = torch.nn.Sequential(pruned)
    cut = serving.shard_for_serving(model, plan_of(model, "row_wise", 2, "quant_torch"))[0]
    for one in (pruned, cut):
        assert [table.name for table in one.tables] == ["a", "b", "c"]
        assert one.embedding_names() == whole.embedding_names()
        assert (one.is_weighted(), one.output_dtype) == (False, torch.float32)
        rows = one.quantized_rows("c").packed()
        assert torch.equal(rows[:2], whole.quantized_rows("c").packed()[1:3])
        with pytest.raises(sw.UnknownNameError, match="no table 'd'"):
            one.quantized_rows("d")
        with pytest.raises(AttributeError, match="colour"):
            one.colour  # noqa: B018  # asked for, as by hasattr


@pytest.mark.parametrize("kept", [[3, 0], []])
def test_pruned_tables_script(kept: list[int]) -> None:
    model = Pooled(serving.quantize_embeddings(collection("MEAN"), ids={"c": kept}))
    cut = serving.shard_for_serving(model, plan_of(model, "column_wise", 2, "quant_torch"))
    wanted = model(batch(0)).values()
    for one in (model, cut):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that TorchScript is deprecated
            script = torch.jit.script(one)
        torch.testing.assert_close(script(batch(0)).values(), wanted, rtol=1e-4, atol=1e-5)


def test_rows_that_are_tensors_are_refused() -> None:
    quantized: Any = serving.quantize_embeddings(collection("SUM"), "INT4")
    with pytest.raises(sw.InvalidInputError, match=r"takes QuantizedRows, got a Tensor: .* 'INT4'"):
        quantized.set_rows("c", torch.zeros(5, 16))


@pytest.mark.parametrize(
    ("table", "ids", "error", "text"),
    [
        ("c", "all", sw.InvalidInputError, "ids of table 'c' must be integers, got a str"),
        ("c", torch.tensor([1.5]), sw.InvalidInputError, r"ids of table 'c' are torch.* must be integers"),
        ("c", torch.ones(5).bool(), sw.InvalidInputError, r"ids of table 'c' are torch.* must be integers"),
        ("c", torch.tensor([1, 5]), sw.InvalidInputError, "table 'c' are from 1 to 5; its rows are 0 to 4"),
        ("c", torch.tensor([1, 1]), sw.InvalidInputError, "1 more than once .2 ids, 1 of them distinct."),
        ("d", torch.tensor([1]), sw.UnknownNameError, "ids names 'd'"),
        ("a", torch.tensor([1]), sw.UnsupportedError, "feature 'f' is looked up in table 'b' and in another"),
    ],
)
def test_ids_that_cannot_be_kept_raise(table: str, ids: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        serving.quantize_embeddings(collection("SUM"), ids={table: ids})


def test_pruned_tables_take_ids_alone_and_give_no_indices() -> None:
    pruned = serving.quantize_embeddings(collection("SUM"), ids={"c": torch.tensor([1])})
    floats = sw.KeyedJaggedTensor(["f", "g", "h"], torch.tensor([0.5, 1, 2]), lengths=torch.tensor([1, 1, 1]))
    with pytest.raises(sw.InvalidInputError, match="ids are int32 or int64"):
        pruned(floats)
    with pytest.raises(sw.InvalidInputError, match="features must be a KeyedJaggedTensor"):
        pruned(floats.values())
    with pytest.raises(sw.UnsupportedError, match="need_indices"):
        serving.quantize_embeddings(collection("NONE"), ids={"c": torch.tensor([1])})
