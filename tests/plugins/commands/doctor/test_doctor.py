"""`shardwright doctor`: what is installed, whether it works together, and what would mend it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.conftest import make_plugin

import shardwright as sw
from shardwright.host import PluginHost, host
from shardwright_plugins.comm_backends._checks import comm_backends
from shardwright_plugins.commands.doctor import checks
from shardwright_plugins.commands.doctor.command import examine
from shardwright_plugins.compute_kernels._fbgemm_check import Installed, diagnose, goes_with
from shardwright_plugins.measuring import processor as processors
from shardwright_testing import installed

Doctor = Callable[..., subprocess.CompletedProcess[str]]
CPU_COMMAND = "pip install 'fbgemm-gpu-cpu==1.8.*'"


@pytest.mark.parametrize(
    ("torch_version", "fbgemm"),
    [
        ("2.5.1", "1.0"),
        ("2.11.0+cu126", "1.6"),
        ("2.13.0+cpu", "1.8"),
        ("2.14.0a0+git1234", "1.9"),
        ("2.4.0", None),
        ("3.0.0", None),
    ],
)
def test_goes_with_counts_with_torchs_minor_releases(torch_version: str, fbgemm: str | None) -> None:
    assert goes_with(torch_version) == fbgemm


def here(
    version: str | None = "1.8.0",
    *,
    torch_version: str = "2.13.0+cpu",
    cuda: str = "",
    failure: str | None = None,
    name: str = "fbgemm-gpu-cpu",
) -> Installed:
    return Installed(torch_version, cuda, {} if version is None else {name: version}, failure)


CUDA_COMMAND = "pip install 'fbgemm-gpu==1.8.*'"
BOTH = Installed("2.13.0", "", {"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, None)


@pytest.mark.parametrize(
    ("installed", "state", "reason", "command"),
    [
        (here(), "ok", "", ""),
        (here("1.8.2", torch_version="2.13.1"), "ok", "", ""),
        (here(None), "absent", "", CPU_COMMAND),
        (
            here("1.9.0"),
            "broken",
            "fbgemm-gpu-cpu 1.9.0 does not go with torch 2.13.0+cpu, which 1.8 goes with",
            f"pip uninstall --yes fbgemm-gpu-cpu && {CPU_COMMAND}",
        ),
        (
            here(None, torch_version="2.13.0+cu126", cuda="12.6"),
            "absent",
            "",
            f"{CUDA_COMMAND} --index-url https://download.pytorch.org/whl/cu126",
        ),
        (here(None, torch_version="2.13.0", cuda="13.0"), "absent", "", CUDA_COMMAND),
        (
            BOTH,
            "broken",
            "overwrite each other",
            f"pip uninstall --yes fbgemm-gpu fbgemm-gpu-cpu && {CPU_COMMAND}",
        ),
    ],
)
def test_diagnose_says_what_does_not_fit_and_the_command_that_mends_it(
    installed: Installed, state: str, reason: str, command: str
) -> None:
    told = diagnose(installed)
    assert (told.state, told.command) == (state, command)
    assert reason in told.reason


@pytest.mark.parametrize(
    ("failure", "meaning"),
    [
        ("OSError: fbgemm_gpu_py.so: undefined symbol: _ZN3c106detail", "compiled against another torch"),
        ("OSError: libcudart.so.12: cannot open shared object file", "compiled for CUDA"),
        ("OSError: libamdhip64.so.6: cannot open shared object file", "compiled for ROCm"),
        ("ImportError: /lib/libc.so.6: version `GLIBC_2.38' not found", "a newer system"),
        ("RuntimeError: tried to register an operator that was registered before", "two builds"),
        ("ModuleNotFoundError: No module named 'fbgemm_gpu'", "removed in part"),
        ("AttributeError: '_OpNamespace' 'fbgemm' object has no attribute 'x'", "its operators"),
    ],
)
def test_diagnose_explains_what_the_import_ends_with(failure: str, meaning: str) -> None:
    told = diagnose(here(failure=failure))
    assert told.state == "broken"
    assert meaning in told.reason
    assert failure in told.reason
    assert told.command.endswith(CPU_COMMAND)


def write_distribution(folder: Path, name: str, version: str, module: str, source: str) -> None:
    """An installation in a folder, of one module, whose import does as `source` says."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def write_fbgemm(folder: Path, version: str, source: str) -> None:
    write_distribution(folder, "fbgemm-gpu-cpu", version, "fbgemm_gpu", source)


def run(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWRIGHT_")}
    folders = os.pathsep.join([*([str(path)] if path else []), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": folders, **environment},
        capture_output=True,
        text=True,
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["part"], one["name"]): one for one in json.loads(done.stdout)}


def test_doctor_tells_versions_devices_plugins_and_variables() -> None:
    done = run(
        "-m", "shardwright", "doctor", "--json", SHARDWRIGHT_INPUT_CHECKS="strict", OMP_NUM_THREADS="1"
    )
    found = findings(done)
    assert found["torch", "torch"]["found"] == torch.__version__
    assert found["python", "CPython"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert found["devices", "cpu"]["state"] == "ok"
    assert found["devices", "host memory"]["reason"].startswith("detected")
    assert found["environment", "SHARDWRIGHT_INPUT_CHECKS"]["found"] == "strict"
    assert found["environment", "OMP_NUM_THREADS"]["found"] == "1"
    assert {part for part, _ in found} >= {"plugins", "comm backends", "FBGEMM", "Numba"}
    broken = [one for one in found.values() if one["state"] == "broken"]
    assert done.returncode == bool(broken)


@pytest.mark.slow
def test_doctor_fbgemm_with_an_undefined_symbol_is_explained_and_costs_nothing_else(tmp_path: Path) -> None:
    write_fbgemm(tmp_path, "1.9.0", "raise OSError('fbgemm_gpu_py.so: undefined symbol: _ZN3c106detail')\n")
    done = run("-m", "shardwright", "doctor", path=tmp_path)
    assert done.returncode == 1
    words = " ".join(done.stdout.split())  # a page's lines end between them
    assert "fbgemm-gpu-cpu 1.9.0 does not go with torch" in words
    assert "compiled against another torch" in words
    assert "the project goes on without it" in words
    assert (
        "to mend fbgemm-gpu-cpu: pip uninstall --yes fbgemm-gpu-cpu && pip install 'fbgemm-gpu" in done.stdout
    )
    lookup = """
import torch, shardwright as sw
config = sw.EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
bags = sw.EmbeddingBagCollection([config], device="cpu")
ids = sw.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
expected = bags.embedding_bags["t"].weight[1:3].sum(0, keepdim=True)
torch.testing.assert_close(bags(ids).values(), expected)
"""
    assert run("-c", lookup, path=tmp_path).returncode == 0


@pytest.mark.slow
def test_doctor_fbgemm_that_takes_its_process_down_is_told(tmp_path: Path) -> None:
    write_fbgemm(tmp_path, "1.8.0", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = run("-m", "shardwright", "doctor", "--json", path=tmp_path)
    assert done.returncode == 1
    finding = findings(done)["FBGEMM", "fbgemm-gpu-cpu"]
    assert finding["state"] == "broken"
    assert "its import ended the process with signal 9" in finding["reason"]


def test_doctor_numba_that_cannot_be_imported_is_broken(
    tmp_path: Path, run_doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "raise ImportError('Numba needs NumPy 2.2 or less')\n"
    write_distribution(tmp_path, "numba", "0.60", "numba", fails)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    done = run_doctor(json=True)
    finding = findings(done)["Numba", "numba"]
    assert (done.returncode, finding["state"], finding["found"]) == (1, "broken", "0.60")
    assert "Numba needs NumPy 2.2 or less" in finding["reason"]
    assert finding["command"] == "pip install --upgrade 'numba>=0.60'"


def test_doctor_wrong_variables_are_named_with_the_nearest(run_doctor: Doctor) -> None:
    done = run_doctor(json=True, SHARDWRIGHT_PLUGIN="", SHARDWRIGHT_INPUT_CHECKS="stric")
    found = findings(done)
    assert done.returncode == 1
    assert "Did you mean 'SHARDWRIGHT_PLUGINS'?" in found["environment", "SHARDWRIGHT_PLUGIN"]["reason"]
    assert "Did you mean 'strict'?" in found["environment", "SHARDWRIGHT_INPUT_CHECKS"]["reason"]
    assert found["torch", "torch"]["state"] == "ok"


def test_doctor_reads_each_variable_of_the_built_in_parts(run_doctor: Doctor, tmp_path: Path) -> None:
    told = findings(
        run_doctor(
            json=True,
            SHARDWRIGHT_COMPARE_REPLICAS_EVERY="0",
            SHARDWRIGHT_MAPPED_FOLDER=str(tmp_path / "missing"),
            SHARDWRIGHT_SHARED_MEMORY="off",
            SHARDWRIGHT_STRICT_PLUGINS="0",
        )
    )
    states = {name: one["state"] for (part, name), one in told.items() if part == "environment"}
    wrong = {name for name, state in states.items() if state != "ok"}
    assert wrong == {"SHARDWRIGHT_MAPPED_FOLDER"}
    assert "is no folder" in told["environment", "SHARDWRIGHT_MAPPED_FOLDER"]["reason"]


def test_doctor_a_plugin_that_fails_is_broken_and_one_that_is_off_is_not(run_doctor: Doctor) -> None:
    done = run_doctor(json=True, SHARDWRIGHT_PLUGINS="acme_good,acme_bad_import")
    found = findings(done)
    assert done.returncode == 1
    assert (found["plugins", "acme_good"]["state"], found["plugins", "acme_good"]["reason"]) == ("ok", "good")
    assert found["plugins", "acme_slow"]["state"] == "off"
    failed = found["plugins", "acme_bad_import"]
    assert failed["state"] == "broken"
    assert "No module named 'acme_needs_this'" in failed["reason"]
    assert failed["command"] == "export SHARDWRIGHT_PLUGINS=-acme_bad_import"
    only_good = run_doctor(json=True, SHARDWRIGHT_PLUGINS="acme_good")
    assert {one["state"] for key, one in findings(only_good).items() if key[0] == "plugins"} == {"ok", "off"}


def test_doctor_without_torch_breaks_nothing_and_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("SHARDWRIGHT_INPUT_CHECKS", "off")
    found = list(examine(host().extensions))
    assert [one for one in found if one.state == "broken"] == []
    (told,) = (one for one in found if one.part == "torch")
    assert (told.state, told.command) == ("absent", "pip install 'shardwright[cpu]'")
    assert {one.part for one in found} >= {"python", "plugins", "environment"}


@pytest.mark.parametrize("has_gpu", [False, True])
def test_doctor_tells_a_build_for_cuda_where_there_is_no_gpu(
    run_doctor: Doctor, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(checks, "devices", lambda: iter(()))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    told = findings(run_doctor(json=True))
    assert told["torch", "torch"]["reason"] == "built for CUDA 13.0"
    assert (("torch", "build for CPUs") in told) == (not has_gpu)
    if not has_gpu:
        finding = told["torch", "build for CPUs"]
        assert finding["state"] == "absent"  # it is no fault
        assert "'torch==2.13.0' --index-url https://download.pytorch.org/whl/cpu" in finding["command"]


def test_doctor_torch_that_cannot_be_imported_is_the_one_thing_broken(tmp_path: Path) -> None:
    fails = "raise ImportError('libtorch_cpu.so: undefined symbol: x')\n"
    write_distribution(tmp_path, "torch", "2.13.0", "torch", fails)
    done = run("-m", "shardwright", "doctor", "--json", path=tmp_path, SHARDWRIGHT_INPUT_CHECKS="off")
    found = findings(done)
    assert done.returncode == 1
    assert [place for place, one in found.items() if one["state"] == "broken"] == [("torch", "torch")]
    assert "undefined symbol: x" in found["torch", "torch"]["reason"]
    assert found["torch", "torch"]["command"] == "pip install --force-reinstall 'torch==2.13.0'"
    assert found["environment", "SHARDWRIGHT_INPUT_CHECKS"]["state"] == "ok"


def test_doctor_tells_what_of_a_device_is_detected_and_what_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright_plugins.bandwidths import measured

    speeds = {"hbm_mem_bw": 2**30, "hbm_to_ddr_mem_bw": 2**25}  # bytes/ms
    monkeypatch.setattr(measured, "device_bandwidths", lambda device: speeds)
    told = {one.name: (one.found, one.reason) for one in checks._bandwidths(torch.device("cuda", 0))}
    assert told["hbm_mem_bw"] == ("1000 GiB/s", "detected: by the device's attributes, or a timed copy")
    assert told["hbm_to_ddr_mem_bw"][0] == "31 GiB/s"
    assert told["intra_host_bw"][1].startswith("assumed (TorchRec 1.8 default)")


def check(word: str, look: Callable[[], Any]) -> type[sw.Extension]:
    return type("Check", (sw.Extension,), {"name": f"check:{word}", "load": lambda self: look})


@pytest.mark.parametrize(
    ("here", "state"),
    [("AMD EPYC (family 26, model 2)", "ok"), ("Intel(R) Xeon(R) Platinum 8488C", "absent")],
)
def test_doctor_tells_whether_the_constants_that_plans_go_by_are_of_this_processor(
    monkeypatch: pytest.MonkeyPatch, here: str, state: str
) -> None:
    monkeypatch.setattr(processors, "processor", lambda: here)
    (found,) = (one for one in checks.devices() if one.name == "machine")
    assert found.state == state
    assert ("calibrate" in found.command) == (state == "absent")
    assert (here in found.reason) == (state == "absent")


def test_doctor_a_comm_backend_of_a_plugins_own_name_is_fine_and_says_when_it_is_used() -> None:
    class Acme(sw.CommBackend):
        name, devices = "acme_links", ("cpu",)

        def connect(self, process_group: Any) -> Any:
            raise NotImplementedError

    with installed(Acme()):
        found = {one.name: one for one in comm_backends()}
    assert (found["acme_links"].state, found["gloo"].state) == ("ok", "ok")
    assert "comm_backend='acme_links'" in found["acme_links"].reason
    assert found["gloo"].reason == ""


def test_doctor_runs_the_checks_of_a_plugin_and_goes_on_where_one_fails() -> None:
    def raises() -> Any:
        yield sw.Finding("cards", "first", "1.0")
        raise OSError("no such card")

    def cannot_load(self: sw.Extension) -> Any:
        raise ImportError("no cards")

    torn = check("torn", raises)
    torn.load = cannot_load  # type: ignore[method-assign]
    offered = [check("cards", raises), check("python", lambda: []), check("texts", lambda: ["fine"]), torn]
    plugin = make_plugin({"shardwright_extensions": lambda: offered})
    found = list(examine(PluginHost(entry_points=(), plugins={"acme": plugin}, environment={}).extensions))
    assert [(one.part, one.state) for one in found] == [
        ("cards", "ok"),
        ("cards", "broken"),
        ("texts", "broken"),
        ("torn", "broken"),
    ]
    reasons = [one.reason for one in found]
    assert "OSError: no such card" in reasons[1]
    assert "'fine', which is no Finding" in reasons[2]
    assert "'check:torn' of plugin 'acme' from this process cannot be imported" in reasons[3]


@pytest.mark.parametrize("columns", ["", pytest.param("100", marks=pytest.mark.slow), "80"])
def test_doctor_fits_the_page(run_doctor: Doctor, columns: str) -> None:
    page = run_doctor(COLUMNS=columns).stdout.partition("broken.")[0]  # commands are printed as they are
    assert max(map(len, page.splitlines())) <= int(columns or "100")
    words = " ".join(page.split())
    for text in ("acme_bad_import", "No module named 'acme_needs_this'", "acme-duplicate-two 2.0"):
        assert text in words


@pytest.mark.gpu
def test_doctor_measures_the_device_that_is_there() -> None:
    found = findings(run("-m", "shardwright", "doctor", "--json"))
    for name in ("hbm_mem_bw", "hbm_to_ddr_mem_bw"):
        assert found["devices", name]["reason"].startswith("detected")
        assert float(found["devices", name]["found"].split()[0]) > 1.0
