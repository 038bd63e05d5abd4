"""The C++ program predicts by packages what Python predicts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import shardwright_serving as serving
import torch
from tests.contrib import distributions
from tests.contrib.serving.packages.models import BATCHES, KEYS, Model, batch
from tests.contrib.serving.packages.test_export_for_inference import export

import shardwright as sw

SOURCE = distributions.ROOT / "serving" / "cpp"
PAGE = distributions.ROOT / "serving" / "shardwright_serving" / "docs" / "packages.md"
pytestmark = pytest.mark.slow


def run(*command: Any, **others: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **others)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built."""
    for tool in ("cmake", os.environ.get("CXX", "c++")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    build = tmp_path_factory.mktemp("build")
    where = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    configured = run("cmake", "-S", SOURCE, "-B", build, where)
    if "nlohmann_json" in configured.stderr and configured.returncode:
        pytest.skip("nlohmann_json, JSON for Modern C++, is not installed")
    assert configured.returncode == 0, configured.stderr
    built = run("cmake", "--build", build)
    assert built.returncode == 0, built.stdout + built.stderr
    return build / "shardwright_predict"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("package"), Model(), forms=["pt2", "torchscript"])


def line(dense: torch.Tensor, features: sw.KeyedJaggedTensor) -> str:
    """A batch as the program reads it; a feature without ids is left out."""

    def bags(key: str, values: torch.Tensor) -> list[list[float]]:
        return [bag.tolist() for bag in values.split(features[key].lengths().tolist())]

    keys = [key for key in KEYS if len(features[key].values())]
    return json.dumps(
        {
            "features": {key: bags(key, features[key].values()) for key in keys},
            "weights": {key: bags(key, features[key].weights()) for key in keys},
            "dense": dense.tolist(),
        }
    )


def test_page_names_all_libraries_that_the_program_is_built_with() -> None:
    libraries = re.findall(r"find_package\((\w+)", (SOURCE / "CMakeLists.txt").read_text())
    assert set(libraries) == {"Torch", "nlohmann_json"}
    text = PAGE.read_text().partition("`contrib/serving/cpp`")[2].partition("```console")[0].lower()
    assert [name for name in libraries if name.lower() not in text] == []


@pytest.mark.parametrize("form", ["pt2", "torchscript"])
def test_cpp_program_predicts_what_python_predicts(program: Path, package: Path, form: str) -> None:
    batches = [batch(lengths, seed) for seed, lengths in enumerate(BATCHES)]
    done = run(program, package, form, input="\n".join(line(*one) for one in batches))
    assert done.returncode == 0, done.stderr
    loaded = serving.load_package(package, form)
    for text, (dense, features) in zip(done.stdout.splitlines(), batches, strict=True):
        found = {name: torch.tensor(value) for name, value in json.loads(text).items()}
        torch.testing.assert_close(found, loaded.predict(features, dense))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"features": {"f": [[30]]}, "weights": {"f": [[1.0]]}}, "f: id 30 is no row"),
        ({"features": {"f": [[1.7]]}, "weights": {"f": [[1.0]]}}, "f: id 1.7 is no whole number"),
        ({"features": {"f": [[1, 2]]}, "weights": {"f": [[1.0]]}}, "f: each id needs a weight"),
        (
            {"features": {"f": [[1]]}, "weights": {"f": [[1.0], []]}},
            "f has weights of another number of samples",
        ),
        ({"features": {"f": [[1]], "g": [[1], [2]]}}, "g has another number of samples"),
        ({"features": {"other": [[1]]}}, "unknown feature other"),
        ({"dense": [[1.0]]}, "dense has another number of columns"),
        ({"dense": []}, "dense has another number of samples"),
        ({"features": {"f": []}}, "a batch has one sample at least"),
    ],
)
def test_program_refuses_what_does_not_fit(
    program: Path, package: Path, change: dict[str, Any], text: str
) -> None:
    fits = {"features": {"f": [[]]}, "dense": [[1.0, 2.0, 3.0]]}
    found = run(program, package, "pt2", input=json.dumps(fits | change))
    assert (found.returncode, found.stderr) == (1, f"shardwright_predict: {text}\n")


def test_program_refuses_other_formats_and_rows_that_were_cut_short(
    program: Path, package: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(package, tmp_path / "copied")
    size = (copied / "rows.bin").stat().st_size
    manifest = json.loads((copied / "package.json").read_text())
    (copied / "package.json").write_text(json.dumps({**manifest, "format": 2}))
    found = run(program, copied, "torchscript", input="{}")
    assert (found.returncode, "format is not 1" in found.stderr) == (1, True)
    (copied / "package.json").write_text(json.dumps(manifest))
    os.truncate(copied / "rows.bin", size - 1)
    found = run(program, copied, "torchscript", input="{}")
    assert found.returncode == 1
    assert f"rows.bin has {size - 1} bytes, and its package was written with {size}" in found.stderr
