"""The report of names and signatures, and the contract that it measures."""

from __future__ import annotations

import dataclasses
import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import shardwright_serving as serving
import torch
from shardwright_torchrec.api import report
from shardwright_torchrec.api.contract import CONTRACT
from shardwright_torchrec.api.left_out import LEFT_OUT, METHODS_LEFT_OUT
from shardwright_torchrec.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from shardwright_torchrec.names import find
from shardwright_torchrec.parallel.model_parallel import (
    DistributedModelParallel,
    get_unwrapped_module,
)
from shardwright_torchrec.quant.inference import (
    DEFAULT_QUANT_MAPPING,
    DEFAULT_SHARDERS,
    quantize_inference_model,
    shard_quant_model,
    trim_torch_package_prefix_from_typename,
)
from tests.contrib import distributions

import shardwright as sw

README = distributions.ROOT / "torchrec" / "README.md"


class OfTorchRec:
    """A class of TorchRec's that has what the one here has, but for one method."""

    def add_param_group(self, group: object) -> None: ...

    __init__ = sw.KeyedOptimizer.__init__
    load_state_dict = sw.KeyedOptimizer.load_state_dict
    init_state = sw.KeyedOptimizer.init_state

    def save_param_groups(self, save: bool = True) -> None: ...


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[report.Compared]:
    """The report where TorchRec is what is here, but for `KeyedOptimizer`."""
    methods = ("add_param_group", "__init__", "load_state_dict", "init_state", "save_param_groups")
    contract: dict[str, Any] = {"torchrec.optim.keyed": {"KeyedOptimizer": methods}}
    contract["torchrec.inference.modules"] = {"shard_quant_model": (), "not_here": ()}
    names = {"KeyedOptimizer": OfTorchRec, "shard_quant_model": shard_quant_model, "not_here": len}
    monkeypatch.setattr(report, "CONTRACT", contract)
    monkeypatch.setattr(report, "torchrec_module", lambda name: SimpleNamespace(**names))
    return report.compare()


def test_report_tells_what_differs_with_both_signatures(compared: list[report.Compared]) -> None:
    states = {one.name.rpartition(".")[2]: one for one in compared if one.kind == "contract"}
    assert {name: one.state for name, one in states.items()} == {
        "add_param_group": "different",
        "__init__": "same",
        "load_state_dict": "same",
        "init_state": "same",
        "save_param_groups": "different",
        "shard_quant_model": "same",
        "not_here": "missing",
    }
    assert (states["save_param_groups"].theirs, states["save_param_groups"].ours) == (
        "(self, save=True)",
        "(self, save)",
    )


@pytest.mark.usefixtures("compared")
def test_report_as_json_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {"name", "kind", "state", "theirs", "ours"} == set(rows[0])
    assert sum(row["kind"] == "import" for row in rows) == len(report.public_imports())


def test_public_imports_resolve_but_for_those_left_out_with_a_reason(compared: list[report.Compared]) -> None:
    found = [one for one in compared if one.kind == "import"]
    assert len(found) > 370
    assert {one.name for one in found if one.state != "same"} == set(LEFT_OUT)


def test_report_tells_what_a_missing_name_needs(
    compared: list[report.Compared], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(module: str, name: str) -> None:
        raise ModuleNotFoundError("No module named 'numba'")

    monkeypatch.setattr(report, "find", fail)
    monkeypatch.setattr(report, "import_module", lambda name: SimpleNamespace(__version__="1.8.0"))
    report.main([])
    assert (
        capsys.readouterr().out.count("here     cannot be imported: No module named 'numba'")
        > len(compared) / 2
    )


def test_readme_has_the_tables_that_the_command_prints(compared: list[report.Compared]) -> None:
    lines = report.markdown(compared).splitlines()
    (contract,) = (
        line for line in lines if "contract" in line
    )  # of the installed TorchRec, which tests do without
    lines.remove(contract)
    assert set(lines) <= set(README.read_text().splitlines())


@pytest.mark.parametrize("module", sorted(CONTRACT))
def test_contract_is_here_and_its_type_hints_resolve(module: str) -> None:
    for name, methods in CONTRACT[module].items():
        own = find(module, name)
        for method in methods:
            if f"{name}.{method}" in METHODS_LEFT_OUT:
                assert not hasattr(own, method)
            elif not method.startswith("_key_"):  # not a name that scripts use
                compared = report._compared(f"{name}.{method}", getattr(own, method), getattr(own, method))
                assert compared.state == "same"


@pytest.mark.parametrize("kind", [EmbeddingConfig, EmbeddingBagConfig])
def test_configuration_takes_torchrecs_fields_and_is_replaced(kind: Any) -> None:
    table = kind(10, 8, "t", feature_names=["f"], need_pos=False, use_virtual_table=False)
    wider = dataclasses.replace(table, embedding_dim=16)
    assert type(wider) is kind
    assert (wider.embedding_dim, wider.name, wider.feature_names) == (16, "t", ["f"])
    with pytest.raises(sw.UnsupportedError, match=r"table 't': use_virtual_table=True .*hash-embedding"):
        kind(10, 8, "t", use_virtual_table=True)


def model() -> torch.nn.Module:
    bags = sw.EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])])
    return torch.nn.ModuleDict({"bags": bags, "dense": torch.nn.Linear(8, 1)})


def test_model_takes_torchrecs_arguments() -> None:
    env = sw.ShardingEnv.local(device_type="cpu")
    wrapper = sw.DefaultDataParallelWrapper()
    made = DistributedModelParallel(model(), env, init_parameters=False, data_parallel_wrapper=wrapper)
    assert [name for name, _ in made.bare_named_parameters()] == ["dense.weight", "dense.bias"]
    assert made.sparse_grad_parameter_names() == []
    assert get_unwrapped_module(made) is made.module

    class Own:
        def wrap(self, dmp: Any, env: Any, device: Any) -> None: ...

    with pytest.raises(sw.UnsupportedError, match=r"data_parallel_wrapper=Own.*init_data_parallel=False"):
        DistributedModelParallel(model(), env, data_parallel_wrapper=Own())  # type: ignore[arg-type]
    with pytest.raises(sw.UnsupportedError, match="model_tracker_configs"):
        DistributedModelParallel(model(), env, model_tracker_configs=object())


def test_quantising_takes_torchrecs_arguments() -> None:
    quantised = quantize_inference_model(model(), fp_weight_dtype=torch.int8)
    sharded, plan = shard_quant_model(quantised, sharders=DEFAULT_SHARDERS, ddr_cap=10**9)
    assert type(quantised["bags"]) in DEFAULT_QUANT_MAPPING.values()  # type: ignore[index]
    assert isinstance(sharded["bags"], serving.PlacedQuantEmbeddingBagCollection)  # type: ignore[index]
    assert list(plan.plan) == ["bags"]
    assert trim_torch_package_prefix_from_typename("<torch_package_0>.a.B") == "a.B"
    assert trim_torch_package_prefix_from_typename("a.B") == "a.B"
    with pytest.raises(sw.UnsupportedError, match="fp_weight_dtype"):
        quantize_inference_model(model(), fp_weight_dtype=torch.float16)


def test_report_without_torchrec_is_told_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(words: object) -> None:
        raise sw.UnsupportedError("TorchRec itself is needed")

    monkeypatch.setattr(report, "main", refuse)
    monkeypatch.setattr("sys.argv", ["shardwright_torchrec", "api"])
    with pytest.raises(SystemExit, match="error: TorchRec itself is needed"):
        importlib.import_module("shardwright_torchrec.__main__").main()
