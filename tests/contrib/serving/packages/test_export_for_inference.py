"""Packages predict what quantized models predict, whatever the models were: whole, sharded, or in a checkpoint."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardwright_serving as serving
import torch
from shardwright_serving.packages import checking
from shardwright_serving.packages.checking import check_package, drawn_inputs
from shardwright_serving.packages.manifest import Manifest
from shardwright_serving.packages.served import served_in, tables_of
from tests.contrib.serving.packages.models import BATCHES, EXAMPLE, PER_TABLE, Model, bag, batch
from tests.errors import files_of_at_most, raises
from tests.programs import printed_by
from torch import Tensor, nn

import shardwright as sw

# torch.export takes a second or two a model; in each run, the model of `package` is exported.
FORMS = ["torchscript", pytest.param("exported", marks=pytest.mark.slow)]


def assert_predicts(path: Path, form: str, model: nn.Module) -> None:
    """For all batches a form of a package gives what the model gives once it is quantized."""
    package = serving.load_package(path, form)
    quantized = serving.quantize_embeddings(model, per_table=PER_TABLE)
    for seed, lengths in enumerate(BATCHES):
        dense, features = batch(lengths, seed)
        with torch.no_grad():
            wanted = quantized(dense, features)
        torch.testing.assert_close(package.predict(features, dense), wanted, rtol=1e-4, atol=1e-5)


def export(path: Path, model: nn.Module, **others: Any) -> Path:
    return serving.export_for_inference(
        model, batch(EXAMPLE), path / "package", per_table=PER_TABLE, **{"check": False, **others}
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the model, without a compiled form."""
    return export(tmp_path_factory.mktemp("package"), Model(), forms=["exported", "torchscript"])


@pytest.mark.parametrize("form", ["exported", "torchscript"])
def test_package_predicts_what_the_quantized_model_predicts(package: Path, form: str) -> None:
    assert_predicts(package, form, Model())


def test_manifest_tells_inputs_outputs_and_precisions(package: Path) -> None:
    manifest = json.loads((package / "package.json").read_text())
    assert [(one["name"], one["num_embeddings"]) for one in manifest["features"]] == [
        ("f", 30),
        ("g", 40),
        ("h", 20),
    ]
    assert manifest["dense"] == {"name": "dense", "columns": 3}
    assert manifest["outputs"] == [{"name": "click", "shape": [None]}, {"name": "buy", "shape": [None, 1]}]
    assert manifest["precision"] == {"whole": "INT8", "rows": "INT8", **PER_TABLE}
    assert sorted(path.name for path in package.iterdir()) == [
        "model.pt",
        "package.json",
        "program.pt2",
        "rows.bin",
    ]
    assert sorted(path.name for path in package.parent.iterdir()) == ["package"]


def test_package_takes_its_features_out_of_a_batch_in_any_order(package: Path) -> None:
    loaded = serving.load_package(package)
    dense, features = batch(EXAMPLE)
    other = sw.KeyedJaggedTensor.concat([features.permute([2, 0]), features.permute([1])])
    torch.testing.assert_close(loaded.predict(other, dense), loaded.predict(features, dense))
    with raises(
        sw.UnknownNameError, subject="f", possible=[feature.name for feature in loaded.manifest.features]
    ):
        loaded.predict(features.permute([1, 2]), dense)
    with pytest.raises(sw.InvalidInputError, match="takes the dense input 'dense'"):
        loaded.predict(features)
    with pytest.raises(
        sw.UnknownNameError, match=r"no form 'pt2' of its program; it has torchscript, exported"
    ):
        serving.load_package(package, "pt2")


def test_package_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with files_of_at_most(1000), raises(sw.CheckpointError, subject=str(tmp_path / "package")):
        export(tmp_path, Model(), forms=["torchscript"])
    assert not list(tmp_path.iterdir())


def test_package_loads_without_what_exports(package: Path) -> None:
    code = (
        "import sys, shardwright_serving as serving; serving.load_package(sys.argv[1]); print(*sys.modules)"
    )
    modules = printed_by("-c", code, package).split()
    heavy = (
        "shardwright.runtime.",
        "shardwright.planning.planner",
        "torch._inductor",
        "torch.distributed.checkpoint",
    )
    assert [name for name in modules if name.startswith(heavy)] == []


def test_ids_that_are_no_rows_raise(package: Path) -> None:
    dense, features = batch(EXAMPLE)
    wrong = sw.KeyedJaggedTensor(
        features.keys(), features.values() + 1000, features.weights(), lengths=features.lengths()
    )
    for form in ("exported", "torchscript"):
        loaded = serving.load_package(package, form)
        with pytest.raises(sw.InvalidInputError, match=r"feature 'f': id 10.. is not an id of 0 to 29"):
            loaded.predict(wrong, dense)
        with pytest.raises((RuntimeError, IndexError)):
            loaded.run(wrong.values(), wrong.lengths(), wrong.weights(), dense)


def test_rows_that_cannot_be_quantized_name_the_table(tmp_path: Path) -> None:
    model = sw.EmbeddingBagCollection([bag("t", 5, 2, ["f"])])
    with torch.no_grad():
        model.table_weight("t")[3, 1] = torch.inf
    features = sw.KeyedJaggedTensor.from_lists({"f": [[1]]})
    with pytest.raises(sw.InvalidInputError, match=r"table 't', counted from row 0 on: row 3 has"):
        serving.export_for_inference(model, features, tmp_path / "p", forms=["exported"])
    assert list(tmp_path.iterdir()) == []


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = sw.EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=2, feature_names=["f"])
        self.rows = sw.EmbeddingCollection([table])

    def forward(self, features: sw.KeyedJaggedTensor) -> Tensor:
        return self.rows(features)["f"].values()


def items(rows: int = 9, columns: int = 4, feature: str = "f") -> sw.EmbeddingBagCollection:
    return sw.EmbeddingBagCollection([bag("t", rows, columns, [feature])])


class Scaled(nn.Module):
    """Pooled rows times the mean of a dense input of three columns."""

    def __init__(self) -> None:
        super().__init__()
        self.items = items()

    def forward(self, features: sw.KeyedJaggedTensor, dense: Tensor | None) -> Tensor:
        assert dense is not None
        return self.items(features).values() * dense.mean(1, keepdim=True)


class Mute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = items()

    def forward(self, features: sw.KeyedJaggedTensor) -> list[Tensor]:
        return []


FEATURES = sw.KeyedJaggedTensor.from_lists({"f": [[1, 2, 3], []]})


def planned(**types: str) -> sw.ShardingPlan:
    """A plan whose document says the precision of tables."""
    entries = [
        {"name": name, "num_embeddings": 9, "embedding_dim": 4, "feature_names": ["f"], "data_type": one}
        for name, one in types.items()
    ]
    return sw.ShardingPlan(document={"inputs": {"tables": {"value": entries}}})


@pytest.mark.parametrize(
    ("model", "example", "others", "error", "text"),
    [
        (nn.Linear(1, 1), FEATURES, {}, sw.InvalidInputError, "Linear has no collection of tables"),
        (Sequences(), torch.ones(2), {}, sw.InvalidInputError, "the example has no KeyedJaggedTensor"),
        (Sequences(), (FEATURES, FEATURES), {}, sw.UnsupportedError, "the example has 2 KeyedJaggedTensors"),
        (Sequences(), FEATURES, {}, sw.UnsupportedError, r"output 'output' is \[3, 2\] for 2 samples"),
        (Sequences(), FEATURES, {"precision": "FP32"}, sw.UnsupportedError, "cannot be quantized to FP32"),
        (Sequences(), FEATURES, {"precision": "INT9"}, sw.UnsupportedError, "INT9"),
        (Sequences(), FEATURES, {"per_table": {"u": "INT4"}}, sw.UnknownNameError, "per_table names 'u'"),
        (Sequences(), FEATURES, {"forms": ["onnx"]}, sw.InvalidInputError, "forms are some of exported"),
        (Model("meta"), batch(EXAMPLE), {}, sw.InvalidInputError, "has no weights here: give checkpoint="),
        (
            Model(),
            (torch.ones(2, 3), FEATURES),
            {},
            sw.UnknownNameError,
            "feature 'g' of table 'whole' is not in the example",
        ),
        (
            Sequences(),
            sw.KeyedJaggedTensor.from_lists({"f": [[9]]}),
            {},
            sw.InvalidInputError,
            "feature 'f': id 9 is not an id of 0 to 8",
        ),
        (
            Sequences(),
            (FEATURES, torch.ones(3, 1)),
            {},
            sw.InvalidInputError,
            "dense tensor has 3 rows, and its KeyedJaggedTensor 2 samples",
        ),
        (Sequences().rows.forward, FEATURES, {}, sw.InvalidInputError, "model is a torch module, got method"),
        (Mute(), FEATURES, {}, sw.UnsupportedError, "the model has no output"),
        (
            items(),
            FEATURES,
            {"plan": "plan.json"},
            sw.InvalidInputError,
            "plan is a ShardingPlan, got a str",
        ),
        (
            items(),
            FEATURES,
            {"plan": sw.ShardingPlan()},
            sw.InvalidInputError,
            "no table of the plan has a prec",
        ),
        (
            items(),
            FEATURES,
            {"plan": planned(u="INT4")},
            sw.UnknownNameError,
            "the plan names 'u', a table of",
        ),
        (
            serving.quantize_embeddings(items()),
            FEATURES,
            {"per_table": {"t": "INT4"}},
            sw.UnsupportedError,
            "table 't' is INT8 already and cannot become INT4",
        ),
    ],
)
def test_what_cannot_be_exported_raises_and_leaves_nothing(
    tmp_path: Path, model: nn.Module, example: Any, others: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        serving.export_for_inference(model, example, tmp_path / "new" / "package", **others)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(sw.InvalidInputError, match=r"there can be no package .*Not a directory"):
        serving.export_for_inference(items(), FEATURES, tmp_path / "file" / "in" / "package")


def test_folder_that_is_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.InvalidInputError, match="is there already"):
        serving.export_for_inference(Sequences(), FEATURES, tmp_path)


def test_patch_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = serving.export_for_inference(items(), FEATURES, tmp_path / "p", forms=["exported"], check=False)
    (path / "patches").mkdir()
    (path / "patches" / "00000001.npz").write_bytes(b"no archive")
    with pytest.raises(serving.PackageError, match=r"00000001\.npz is no patch, or is damaged"):
        serving.load_package(path)


@pytest.mark.slow
def test_every_form_is_checked_in_a_fresh_process(tmp_path: Path) -> None:
    model = Model()
    path = export(tmp_path, copy.deepcopy(model), check=True)
    assert_predicts(path, "pt2", model)
    with pytest.raises(sw.UnsupportedError) as caught:
        check_package(path, Manifest.read(path), lambda *inputs: [torch.ones(1), torch.ones(1)])
    for form in ("pt2", "torchscript", "exported"):
        assert f"{form}: AssertionError" in str(caught.value)


MEMORY = """
import resource, sys, torch, shardwright as sw, shardwright_serving as serving
folder = sys.argv[1]
table = sw.EmbeddingBagConfig(name="t", num_embeddings=1 << 20, embedding_dim=64, feature_names=["f"])
features = sw.KeyedJaggedTensor.from_lists({"f": [[1, 2], [], [3]]})
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def exported(name, **others):
    model = sw.EmbeddingBagCollection([table], device="meta")
    serving.export_for_inference(model, features, f"{folder}/{name}", forms=["torchscript"], check=False, **others)
if sys.argv[2] == "save":
    sw.save_checkpoint(f"{folder}/saved", sw.EmbeddingBagCollection([table]))
else:
    before = peak()
    exported("package", checkpoint=f"{folder}/saved")
    print(peak() - before)
"""


@pytest.mark.slow
def test_checkpoint_is_exported_in_less_memory_than_its_tables(tmp_path: Path) -> None:
    """256 MiB of float rows, in blocks of 64 MiB whose parts and copies are beside them."""

    printed_by("-c", MEMORY, tmp_path, "save")
    assert float(printed_by("-c", MEMORY, tmp_path, "export")) < 256


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_odd_number_of_fp8_columns_are_found_one_at_a_time(tmp_path: Path, form: str) -> None:
    model = items(columns=3)
    folder = serving.export_for_inference(
        model, FEATURES, tmp_path / "package", precision="FP8", forms=[form], check=False
    )
    wanted = serving.quantize_embeddings(model, "FP8")
    for bags in ([[3]], [[]], [[3, 1], [2]]):
        features = sw.KeyedJaggedTensor.from_lists({"f": bags})
        found = serving.load_package(folder, form).predict(features)["values"]
        torch.testing.assert_close(found, wanted(features).values())


WRONG_BATCHES = [
    sw.KeyedJaggedTensor(["f"], torch.tensor([1.5, 2.0]), lengths=torch.tensor([1, 1])),
    sw.KeyedJaggedTensor(["f", "f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 0, 0, 1])),
    sw.KeyedJaggedTensor(
        ["f", "g"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1, 0]), stride_per_key_per_rank=[[2], [1]]
    ),
]
"""Ids that are no integers, a feature twice, and features of other samples."""


@pytest.mark.parametrize("example", WRONG_BATCHES[:2])
def test_examples_that_tables_cannot_look_up_are_refused(
    tmp_path: Path, example: sw.KeyedJaggedTensor
) -> None:
    with pytest.raises(
        sw.InvalidInputError, match=r"the example: .*(are float32; ids are int|positions 0 and 1)"
    ):
        serving.export_for_inference(items(), example, tmp_path / "package")


def test_predictions_of_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = serving.export_for_inference(
        Scaled(), (FEATURES, torch.ones(2, 3)), tmp_path / "package", forms=["torchscript"], check=False
    )
    package = serving.load_package(folder)
    ids = [(sw.KeyedJaggedTensor.from_lists({"f": [[1, other], []]}), other) for other in (9, -1)]
    wrong: list[tuple[Any, list[Any], str]] = [
        *[
            (FEATURES, [torch.ones(shape)], r"dense input 'dense' of 2 samples is \[2, 3\], got")
            for shape in ([2, 4], [1, 3], [6], [2, 3, 1])
        ],
        *[
            (features, [torch.ones(2, 3)], f"feature 'f': id {other} is not an id of 0 to 8")
            for features, other in ids
        ],
        *[
            (batch, [torch.ones(2, 3)], "are float32; ids are int|positions 0 and 1|of their own")
            for batch in WRONG_BATCHES
        ],
        (FEATURES, [[[1, 2, 3]] * 2], "dense input 'dense' is a tensor, got a list"),
        ({"f": [[1]]}, [], "features are a KeyedJaggedTensor, got dict"),
    ]
    for features, dense, text in wrong:
        with pytest.raises(sw.InvalidInputError, match=text):
            package.predict(features, *dense)


@pytest.mark.slow
def test_no_samples_have_no_predictions(tmp_path: Path) -> None:
    model = sw.EmbeddingBagCollection([bag("t", 9, 4, ["f", "g"])])
    example = sw.KeyedJaggedTensor.from_lists({"f": [[1]], "g": [[2]]})
    folder = serving.export_for_inference(
        model, example, tmp_path / "package", forms=["exported"], check=False
    )
    found = serving.load_package(folder).predict(sw.KeyedJaggedTensor.from_lists({"f": [], "g": []}))
    assert found["values"].shape == (0, 8)


def test_program_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    folder = serving.export_for_inference(
        items(), FEATURES, tmp_path / "package", forms=["torchscript"], check=False
    )
    (folder / "model.pt").write_bytes(b"no program")
    with pytest.raises(serving.PackageError, match=r"model\.pt cannot be loaded"):
        serving.load_package(folder)


def test_rows_of_another_size_are_refused(package: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(package, tmp_path / "copied")
    size = (copied / "rows.bin").stat().st_size
    for other in (size - 1, size + 1):
        os.truncate(copied / "rows.bin", other)
        with pytest.raises(
            serving.PackageError, match=rf"rows\.bin has {other} bytes, .* written with {size}"
        ):
            serving.load_package(copied)
    manifest = json.loads((copied / "package.json").read_text())
    del manifest["rows_bytes"]  # as in older packages
    (copied / "package.json").write_text(json.dumps(manifest))
    serving.load_package(copied)


class Padded(nn.Module):
    """Sums over padded sequences: one as wide as its longest, one of three columns."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            sw.EmbeddingConfig(name=f"t{key}", num_embeddings=9, embedding_dim=2, feature_names=[key])
            for key in "fg"
        ]
        self.rows = sw.EmbeddingCollection(tables)

    def forward(self, features: sw.KeyedJaggedTensor) -> Tensor:
        rows = self.rows(features)
        return rows["f"].to_padded_dense().sum(1) + rows["g"].to_padded_dense(3, 0.5).sum(1)


@pytest.mark.parametrize("form", FORMS)
def test_padded_sequences_are_exported(tmp_path: Path, form: str) -> None:
    model = Padded()
    example = sw.KeyedJaggedTensor.from_lists({"f": [[1, 2], []], "g": [[3], [4]]})
    folder = serving.export_for_inference(model, example, tmp_path / "package", forms=[form], check=False)
    wanted = serving.quantize_embeddings(model)
    for f, g in ([[[]], [[]]], [[[1], [], [3, 4, 5]], [[], [2], [8, 7, 6, 5]]]):
        features = sw.KeyedJaggedTensor.from_lists({"f": f, "g": g})
        found = serving.load_package(folder, form).predict(features)["output"]
        torch.testing.assert_close(found, wanted(features), rtol=1e-4, atol=1e-5)


def test_tables_have_the_precision_that_they_were_planned_with() -> None:
    tables = [bag(name, 9, 4, ["f"]) for name in ("a", "b", "c", "d")]
    plan = planned(a="INT4", b="FP16", c="FP32")
    served = served_in(sw.EmbeddingBagCollection(tables))
    (made,) = tables_of(served, "FP8", {"b": "INT2"}, plan).values()
    assert [table.data_type.value for table in made] == ["INT4", "INT2", "FP8", "FP8"]


class Averaged(nn.Module):
    """A mean that is 0/0 for a bag without ids."""

    def __init__(self) -> None:
        super().__init__()
        self.items = items()

    def forward(self, features: sw.KeyedJaggedTensor) -> Tensor:
        return self.items(features).values() / features["f"].lengths().unsqueeze(1)


def test_check_takes_nan_where_the_model_gives_it_and_nowhere_else(tmp_path: Path) -> None:
    path = serving.export_for_inference(
        Averaged(), FEATURES, tmp_path / "package", forms=["torchscript"], check=False
    )
    inputs = [torch.tensor([1, 2]), torch.tensor([0, 2])]
    (found,) = serving.load_package(path).run(*inputs)
    assert found[0].isnan().all()
    torch.save([(inputs, [found])], tmp_path / "same")
    torch.save([(inputs, [found.nan_to_num()])], tmp_path / "other")
    assert checking._problem(path, "torchscript", tmp_path / "same") == ""
    assert "AssertionError" in checking._problem(path, "torchscript", tmp_path / "other")


class Activated(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.function = items(), function

    def forward(self, features: sw.KeyedJaggedTensor) -> Tensor:
        return self.function(self.items(features).values())


def test_version_is_that_of_operators_inputs_and_weights(tmp_path: Path) -> None:
    def version(function: Callable[[Tensor], Tensor], form: str = "torchscript", key: str = "f") -> str:
        model = Activated(function)
        model.items = sw.EmbeddingBagCollection([bag("t", 9, 4, [key], init_fn=nn.init.ones_)])
        features = sw.KeyedJaggedTensor.from_lists({key: [[1, 2, 3], []]})
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        serving.export_for_inference(model, features, path, forms=[form], check=False)
        return Manifest.read(path).version

    shift, other = torch.tensor([1.0]), torch.tensor([2.0])
    same = [version(torch.relu), version(torch.relu, "exported")]
    assert same[0] == same[1]
    others = [
        version(torch.sigmoid),
        version(torch.relu, key="g"),
        *(version(lambda x, by=by: x + by) for by in (shift, other)),
    ]
    assert len({same[0], *others}) == 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", [[7, 2, 5], []])
def test_pruned_tables_are_exported_and_other_ids_give_zeros(
    tmp_path: Path, kept: list[int], form: str
) -> None:
    model = Averaged()
    quantized = serving.quantize_embeddings(model, "INT8", ids={"t": kept})
    features = sw.KeyedJaggedTensor.from_lists({"f": [[7, 2], [1], [5, 8, 5, -3, 1 << 40]]})
    rows = quantized.items.collection.quantized_rows("t").dequantized()
    path = serving.export_for_inference(quantized, FEATURES, tmp_path / "package", forms=[form], check=False)
    known = {one: rows[at] for at, one in enumerate(kept)}
    wanted = torch.stack(
        [
            sum((known.get(one, torch.zeros(4)) for one in bag), torch.zeros(4)) / len(bag)
            for bag in ([7, 2], [1], [5, 8, 5, -3, 1 << 40])
        ]
    )
    torch.testing.assert_close(serving.load_package(path, form).predict(features)["output"], wanted)
    manifest = Manifest.read(path)
    assert manifest.features[0].num_embeddings is None
    if kept:  # the check draws ids with rows and without
        drawn = {one for ids, *_ in drawn_inputs(manifest, {"f": torch.tensor(kept)}) for one in ids.tolist()}
        assert drawn == {2, 3, 5, 6, 7, 8}


class Nested(nn.Module):
    """Outputs in a structure."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.items, self.key = items(), key

    def forward(self, features: sw.KeyedJaggedTensor) -> dict[str, Any]:
        values = self.items(features).values()
        return {"a": {"b": values}, self.key: [values * 2, values * 3]}


def test_outputs_are_named_by_their_places_and_once(tmp_path: Path) -> None:
    path = serving.export_for_inference(
        Nested("c"), FEATURES, tmp_path / "package", forms=["torchscript"], check=False
    )
    found = serving.load_package(path).predict(FEATURES)
    assert list(found) == ["a.b", "c.0", "c.1"]
    torch.testing.assert_close(found["c.1"], found["a.b"] * 3)


def test_two_outputs_of_one_name_are_refused(tmp_path: Path) -> None:
    model = Nested("a.b")
    model.forward = lambda features: {"a": {"b": (v := model.items(features).values())}, "a.b": v}
    with pytest.raises(sw.UnsupportedError, match=r"two outputs 'a\.b'"):
        serving.export_for_inference(model, FEATURES, tmp_path / "package")


def test_package_replaced_while_it_is_loaded_is_refused(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(package, tmp_path / "package")
    manifest = json.loads((folder / "package.json").read_text())

    def replaced(path: Path) -> Any:
        (folder / "package.json").write_text(json.dumps({**manifest, "version": "other"}))
        return lambda *tensors: ()

    monkeypatch.setattr("shardwright_serving.packages.package.readers", {"exported": replaced})
    with pytest.raises(serving.PackageError, match="was replaced while it was loaded: load it again"):
        serving.load_package(folder, "exported")


class Retrieval(nn.Module):
    """A query tower, a search for the nearest items, and a tower for these, whose batch the model makes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        user = sw.EmbeddingBagConfig(30, 8, "user", feature_names=["f"])
        item = sw.EmbeddingBagConfig(50, 8, "item", feature_names=["item"])
        self.query, self.items = sw.EmbeddingBagCollection([user]), sw.EmbeddingBagCollection([item])
        self.over = nn.Linear(8, 8)
        self.register_buffer("index", torch.randn(50, 8))

    def forward(self, features: sw.KeyedJaggedTensor) -> dict[str, Tensor]:
        query = self.over(self.query(features).values())
        found = (query @ self.index.T).topk(3).indices
        ones = torch.ones(3 * features.stride(), dtype=torch.int64)
        candidates = sw.KeyedJaggedTensor(["item"], found.reshape(-1), lengths=ones)
        return {
            "scores": (query[:, None] * self.items(candidates).values().view(-1, 3, 8)).sum(2),
            "items": found,
        }


@pytest.mark.parametrize("form", ["exported", "torchscript"])
def test_collection_whose_batch_the_model_makes_is_exported(tmp_path: Path, form: str) -> None:
    model = serving.quantize_embeddings(Retrieval(), "INT8")
    features = sw.KeyedJaggedTensor.from_lists({"f": [[1], [2, 3], []]})
    folder = serving.export_for_inference(model, features, tmp_path / "package", forms=[form])
    other = sw.KeyedJaggedTensor.from_lists({"f": [[7], [8], [], [1, 29]]})
    torch.testing.assert_close(serving.load_package(folder).predict(other), model(other))


@pytest.fixture(scope="module")
def sharded() -> sw.DistributedModelParallel:
    """The model, its tables cut by columns where they can be."""
    rules = {"*": sw.ParameterConstraints(sharding_types=["column_wise"], min_partition=4)}
    topology = sw.Topology(world_size=1, compute_device="cpu")
    planner = sw.EmbeddingShardingPlanner(topology=topology, constraints=rules)
    sharders = [sw.EmbeddingBagCollectionSharder(), sw.EmbeddingCollectionSharder()]
    plan = planner.plan(Model("meta"), sharders)
    return sw.DistributedModelParallel(Model(), env=sw.ShardingEnv.local(device_type="cpu"), plan=plan)


def test_sharded_model_is_exported_through_a_checkpoint_that_goes(
    tmp_path: Path, sharded: sw.DistributedModelParallel
) -> None:
    path = export(tmp_path, sharded, forms=["torchscript"])
    assert_predicts(path, "torchscript", Model())
    assert [one.name for one in tmp_path.iterdir()] == ["package"]


def test_checkpoint_of_a_sharded_model_is_exported_by_a_model_on_meta(
    tmp_path: Path, sharded: sw.DistributedModelParallel
) -> None:
    saved = sw.save_checkpoint(tmp_path / "saved", sharded)
    path = export(tmp_path, Model("meta"), checkpoint=saved.path, forms=["torchscript"])
    assert_predicts(path, "torchscript", Model())
    other = Model("meta")
    other.over.insert(1, nn.Linear(8, 8))
    with pytest.raises(sw.CheckpointError, match=r"has no tensor 'model.over.1.weight'"):
        export(tmp_path / "other", other, checkpoint=saved.path, forms=["torchscript"])


def test_collections_cut_for_serving_are_exported(tmp_path: Path) -> None:
    quantized = serving.quantize_embeddings(Model(), "INT8", per_table=PER_TABLE)
    rules = {"*": sw.ParameterConstraints(sharding_types=["row_wise"])}
    planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), constraints=rules)
    sharders = [serving.QuantEmbeddingBagCollectionSharder(), serving.QuantEmbeddingCollectionSharder()]
    placed = serving.shard_for_serving(quantized, planner.plan(quantized, sharders))
    path = serving.export_for_inference(
        placed, batch(EXAMPLE), tmp_path / "package", forms=["torchscript"], check=False
    )
    assert_predicts(path, "torchscript", Model())


def test_weights_of_a_sharded_module_need_its_wrapper(
    tmp_path: Path, sharded: sw.DistributedModelParallel
) -> None:
    with pytest.raises(
        sw.InvalidInputError, match="no weights here: give the DistributedModelParallel around"
    ):
        serving.export_for_inference(sharded.module, batch(EXAMPLE), tmp_path / "package")
    quantized = sw.DistributedModelParallel(serving.quantize_embeddings(Model()), env=sharded.env)
    with pytest.raises(
        sw.UnsupportedError, match=r"cut over ranks: give model.unshard\(\), which every rank"
    ):
        serving.export_for_inference(quantized, batch(EXAMPLE), tmp_path / "package")
