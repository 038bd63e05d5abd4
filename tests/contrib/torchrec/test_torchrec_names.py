"""`import torchrec` gives shardwright, and the tutorials' scripts run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import re
import shutil
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import shardwright_torchrec
from shardwright_torchrec import quant
from shardwright_torchrec.names import ADAPTED, MODULES, QUANTIZED
from tests.contrib import distributions
from tests.ports import own_port
from tests.programs import printed_by

import shardwright

INTERFACES = ("torchrec.distributed.planner.types",)
"""Modules whose names are interfaces of TorchRec's own, where shardwright has others of the same names."""
SCRIPTS = Path(__file__).parent / "torchrec_scripts"
TORCHREC = os.environ.get("SHARDWRIGHT_TORCHREC_PYTHON") or (
    sys.executable if importlib.util.find_spec("torchrec") else None
)


@pytest.fixture
def installed() -> Iterator[None]:
    shardwright_torchrec.install()
    yield
    shardwright_torchrec.uninstall()


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python whose site has the file that an installation of the distribution puts there."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    shutil.copy(distributions.ROOT / "torchrec" / "shardwright_torchrec.pth", site)
    return str(folder / "bin" / "python")


def run_script(*arguments: str, python: str = sys.executable, **variables: str) -> str:
    """Run Python in a process of its own; the ranks that it starts find each other at a free port."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWRIGHT_")}
    path = os.pathsep.join([str(distributions.ROOT / "torchrec"), *sys.path])
    environment |= {"PYTHONPATH": path, "MASTER_PORT": str(own_port()), **variables}
    return printed_by(*arguments, python=python, env=environment)


OWN = {
    **{(module, name): (shardwright, name) for module, names in MODULES.items() for name in names},
    **{(module, name): (quant, own) for module, names in QUANTIZED.items() for name, own in names.items()},
}
"""Module and name of TorchRec -> where the class is, and its name there."""


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("module", sorted({module for module, _ in OWN}))
def test_install_serves_shardwrights_own_classes_and_quantized_modules(module: str) -> None:
    names = importlib.import_module(module)
    for (_, name), (owner, own) in ((one, own) for one, own in OWN.items() if one[0] == module):
        assert getattr(names, name) is getattr(owner, own)
        assert name in dir(names)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("module", sorted(ADAPTED))
def test_install_serves_what_is_bent_to_torchrecs_ways(module: str) -> None:
    names = importlib.import_module(module)
    for name, own in ADAPTED[module].items():
        served = getattr(names, name)
        path, _, there = own.partition(":")
        assert served is getattr(importlib.import_module(f"shardwright_torchrec.{path}"), there or name)
        assert name in dir(names)
        ours = None if module in INTERFACES else getattr(shardwright, name, None)
        assert not isinstance(ours, type) or issubclass(served, ours)


@pytest.mark.usefixtures("installed")
def test_install_submodules_are_attributes_as_in_torchrec() -> None:
    import torchrec

    assert issubclass(torchrec.distributed.DistributedModelParallel, shardwright.DistributedModelParallel)
    assert issubclass(torchrec.distributed.planner.types.Topology, shardwright.Topology)
    assert torchrec.distributed.planner.types.ShardingPlan is shardwright.ShardingPlan
    assert torchrec.distributed.model_parallel.ShardedModule is torchrec.distributed.types.ShardedModule


@pytest.mark.usefixtures("installed")
def test_install_functions_that_are_sent_to_processes_find_their_modules() -> None:
    """Cloudpickle (Ray, Spark) and dill (`multiprocess` in notebooks) send the modules that a function names."""
    import torchrec

    assert pickle.loads(pickle.dumps(torchrec)) is torchrec
    assert pickle.loads(pickle.dumps(torchrec.distributed)) is torchrec.distributed


@pytest.mark.usefixtures("installed")
def test_install_what_is_missing_says_so_with_the_nearest() -> None:
    import torchrec

    with pytest.raises(ModuleNotFoundError, match=r"nothing for 'torchrec\.pt2'.*uninstall\(\)"):
        importlib.import_module("torchrec.pt2")
    with pytest.raises(ModuleNotFoundError, match=r"Did you mean 'torchrec\.distributed\.embedding'"):
        importlib.import_module("torchrec.distributed.embeddin")
    with pytest.raises(AttributeError, match="Did you mean 'KeyedTensor'"):
        _ = torchrec.KeyedTensr
    with pytest.raises(AttributeError, match=r"It is in .*torchrec\.distributed\.types"):
        _ = torchrec.ShardingType
    assert not hasattr(torchrec, "__file__")


@pytest.mark.skipif(TORCHREC is None, reason="SHARDWRIGHT_TORCHREC_PYTHON names no Python with TorchRec")
def test_names_are_where_torchrec_has_them() -> None:
    source = """
import importlib, json
from shardwright_torchrec.names import MODULES, QUANTIZED
pairs = [(m, n) for known in (MODULES, QUANTIZED) for m, names in known.items() for n in names]
print(json.dumps([f"{m}.{n}" for m, n in pairs if not hasattr(importlib.import_module(m), n)]))
"""
    told = run_script("-W", "ignore", "-c", source, python=str(TORCHREC))
    assert json.loads(told.splitlines()[-1]) == []


def test_install_and_use_change_nothing_and_uninstall_gives_the_name_back() -> None:
    with distributions.nothing_changes():
        shardwright_torchrec.install()
        shardwright_torchrec.install()  # the second does nothing
        for module in {*MODULES, *QUANTIZED}:
            names = importlib.import_module(module)
            for name in dir(names):
                getattr(names, name)
        shardwright_torchrec.uninstall()
    assert not shardwright_torchrec.is_installed()
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchrec"]
    assert sys.meta_path.count(shardwright_torchrec.names._finder) == 0


_WHOSE = "import sys, torchrec; print(torchrec.__version__, 'torch' in sys.modules)"


def test_installed_names_are_inherited_by_the_environment(interpreter: str) -> None:
    told = run_script("-c", _WHOSE, python=interpreter, SHARDWRIGHT_TORCHREC="1")
    assert told.split() == ["shardwright", shardwright.__version__, "False"]
    child = f"subprocess.run([{interpreter!r}, '-c', {_WHOSE!r}])"
    starts = f"import shardwright_torchrec as s, subprocess; {{}}; {child}"
    assert run_script("-c", starts.format("s.install()"), python=interpreter) == told
    assert run_script("-c", starts.format("s.install(); s.uninstall()"), python=interpreter) != told


_SUMS = "import torch; print(torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2, 3])).tolist())"


def test_scripts_have_fbgemms_operators_where_it_is_installed(interpreter: str) -> None:
    pytest.importorskip("fbgemm_gpu")
    lines = f"from torchrec import KeyedJaggedTensor; {_SUMS}"
    assert run_script("-c", lines, python=interpreter, SHARDWRIGHT_TORCHREC="1") == "[0, 2, 5]\n"


def test_scripts_do_without_fbgemm(interpreter: str) -> None:
    lines = (
        "import sys; sys.modules['fbgemm_gpu'] = None; import torchrec; print(torchrec.KeyedTensor.__name__)"
    )
    told = run_script("-c", lines, python=interpreter, SHARDWRIGHT_TORCHREC="1")
    assert told == "KeyedTensor\n"


def test_wheel_has_the_file_that_python_reads_at_its_start() -> None:
    folder = distributions.ROOT / "torchrec"
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {
        "shardwright_torchrec.pth": "shardwright_torchrec.pth"
    }
    (line,) = (folder / "shardwright_torchrec.pth").read_text().splitlines()
    assert line.startswith("import ")  # else Python takes it for a folder


def test_import_of_the_distribution_serves_nothing() -> None:
    lines = "import sys, shardwright_torchrec.names as n; print(sys.meta_path)"
    found = run_script("-c", lines)
    assert found
    assert "shardwright" not in found


def test_install_after_torchrec_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", os)
    with pytest.raises(ImportError, match=r"imported already, from .*os\.py.*before the first"):
        shardwright_torchrec.install()
    assert not shardwright_torchrec.is_installed()


def shards_of(line: str) -> dict[str, list[tuple[list[int], list[int], int]]]:
    """Table -> its shards' offsets, sizes and rank, in a plan as the tutorial prints it."""
    tables = re.split(r"'(\w+_table_\d)': ", line)[1:]
    pattern = r"shard_offsets=\[(\d+), (\d+)\], shard_sizes=\[(\d+), (\d+)\], placement='rank:(\d)/cpu'"
    found = {name: re.findall(pattern, text) for name, text in zip(tables[::2], tables[1::2], strict=True)}
    return {
        name: [([int(a), int(b)], [int(c), int(d)], int(rank)) for a, b, c, d, rank in shards]
        for name, shards in found.items()
    }


@pytest.mark.distributed
@pytest.mark.slow
def test_sharding_tutorial_prints_the_plans_that_it_shows(interpreter: str) -> None:
    kinds = ("TABLE_WISE", "ROW_WISE", "COLUMN_WISE", "DATA_PARALLEL")
    script = ("-m", "shardwright_torchrec", str(SCRIPTS / "sharding.py"))
    lines = [line for line in run_script(*script, *kinds, python=interpreter).splitlines() if "plan:" in line]
    assert sorted(line[:6] for line in lines) == sorted(["rank:0", "rank:1"] * len(kinds))
    plans = dict.fromkeys(line.partition("sharding plan: ")[2] for line in lines)
    whole, rows, columns, copies = plans  # one text a type: both ranks print the same
    by_rank = {
        rank: sorted(name for name, [shard] in shards_of(whole).items() if shard[2] == rank)
        for rank in (0, 1)
    }
    for names in by_rank.values():  # "each node will have one large table and one small"
        assert [name.split("_")[0] for name in names] == ["large", "small"]
    for name, sizes in shards_of(rows).items():
        half = (4096 if name.startswith("large") else 1024) // 2
        assert sizes == [([0, 0], [half, 64], 0), ([half, 0], [half, 64], 1)]
    for name, sizes in shards_of(columns).items():
        all_rows = 4096 if name.startswith("large") else 1024
        assert sizes == [([0, 0], [all_rows, 32], 0), ([0, 32], [all_rows, 32], 1)]
    assert copies.count("sharding_type='data_parallel', compute_kernel='dense'") == 4  # its "batched_dense"
    assert whole.count("compute_kernel='fused'") == 4
    assert copies.count("ranks=[0, 1], sharding_spec=None") == 4


def torchrun(python: str, *arguments: str) -> list[str]:
    """What two ranks print, sorted; the variable alone makes them shardwright's."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return sorted(run_script(*launcher, *arguments, python=python, SHARDWRIGHT_TORCHREC="1").splitlines())


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "dcn"])
def test_dlrm_reference_learns_on_two_ranks(interpreter: str, kind: str) -> None:
    assert torchrun(interpreter, str(SCRIPTS / "dlrm.py"), kind) == [
        f"rank {rank}: 30 steps, loss fell: True, AUROC of 3840 samples above 0.9: True" for rank in (0, 1)
    ]


@pytest.mark.distributed
@pytest.mark.slow
def test_generative_recommender_goes_on_from_its_checkpoint(interpreter: str, tmp_path: Path) -> None:
    assert torchrun(interpreter, str(SCRIPTS / "generative.py"), str(tmp_path)) == [
        f"rank {rank}: table sharded: True, loss fell: True, goes on as before: True" for rank in (0, 1)
    ]


@pytest.mark.distributed
@pytest.mark.slow
def test_zero_collision_hashing_learns_on_two_ranks(interpreter: str) -> None:
    assert torchrun(interpreter, str(SCRIPTS / "zch.py")) == [
        f"rank {rank}: 40 steps, NE below 0.8: True, AUC above 0.8: True, rows of their own: True"
        for rank in (0, 1)
    ]


def test_planner_tutorial_plans_as_it_prints() -> None:
    output = run_script("-m", "shardwright_torchrec", str(SCRIPTS / "planner.py"))
    reports = output.split("--- Sharding plan ---")[1:]
    assert len(reports) == 5
    chosen = [re.search(r"(small|huge)_table +\| (\w+) \(.*\| (\w+) +\|", report) for report in reports]
    # On two ranks the tutorial's planner halves the rows. Halves of the columns are as good or better, and as large.
    assert [(found[2], found[3]) for found in chosen if found] == [
        ("TW", "fused"),
        ("CW", "fused"),
        ("TW", "fused"),
        ("RW", "fused"),
        ("CW", "fused_uvm_caching"),
    ]
    # "2.4 GB of HBM memory" on one rank, "1.2 GB" on each of two; "Perf has increased to 0.087 ms".
    assert [re.findall(r"[01] +\| ([\d.]+) GiB", report) for report in reports[:2]] == [
        ["2.4"],
        ["1.2", "1.2"],
    ]
    (milliseconds,) = re.findall(r"largest_rank_time: ([\d.]+) ms", reports[3])
    assert float(milliseconds) == pytest.approx(0.087, abs=0.001)


@pytest.mark.distributed
def test_introduction_runs_as_written() -> None:
    output = run_script("-m", "shardwright_torchrec", str(SCRIPTS / "introduction.py"))
    assert "List of Values:  [tensor([5]), tensor([7, 1])]" in output
    assert "Lengths:  tensor([3, 1, 2, 2]" in output
    assert "(product_table): EmbeddingBag(4096, 64, mode='sum')" in output
    assert "def forward" in output
    assert "torch.Size([2, 128])" in output
    assert "equal to unsharded: True" in output
    for part in ("LazyCall", "InputDist", "Lookup", "OutputDist", "DistributedModelParallel("):
        assert part in output
    assert "sgd(lr=0.01), by default: embedding_bags.product_table.weight" in output
    assert "row_wise_adagrad(lr=0.02, eps=0.002): embedding_bags.product_table.weight" in output
    assert "sgd(lr=0.5): embedding_bags.product_table.weight" in output
    assert "Non Fused Model Parameters:\ndict_keys([])" in output
    first, second = (float(text) for text in re.findall(r"Iteration Loss: ([\d.]+)", output))
    assert second < first
    # Quantized rows are 64 bytes with scale and bias; TorchRec's are filled up to 80.
    for columns, kind in ((64, "float32"), (68, "uint8")):
        assert f"ebc_.embedding_bags.user_table.weight torch.Size([4096, {columns}]) torch.{kind}" in output
    (error,) = (float(text) for text in re.findall(r"largest error: (\S+)", output))
    # Tables of 4096 rows begin between -1 / 64 and 1 / 64: half a step is 1 / 16320 at most, and bags have 3 ids.
    assert 0 < error < 3.1 / 16320
    assert "sharded equal: True" in output
    assert "ebc_ = self.ebc_(kjt)" in output
    assert "traced equal: True" in output
    assert "Scripted Graph Module Created!\nscripted equal: True" in output
