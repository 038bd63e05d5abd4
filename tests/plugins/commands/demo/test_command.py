"""What the command refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from tests.core.conftest import make_class, make_plugin
from typer.testing import CliRunner

import shardwright_plugins.commands
from shardwright import (
    DistributedError,
    InvalidInputError,
    ShardingType,
    ShardwrightError,
    UnknownPluginError,
    UnsupportedError,
)
from shardwright.cli import app
from shardwright.host import PluginHost, use_host
from shardwright_plugins.commands.demo.rank import DemoResult
from shardwright_plugins.commands.demo.settings import DemoSettings
from shardwright_plugins.launch import local

RESULT = DemoResult(
    auc=0.6,
    best_auc=0.8,
    steps=3,
    examples=12,
    examples_per_second=5.0,
    ranks=2,
    plan={},
    held_out_examples=20,
)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[DemoSettings]:
    """The settings of what was launched; nothing is."""
    found: list[DemoSettings] = []

    def remember(entrypoint: object, settings: DemoSettings, *, ranks: int) -> list[DemoResult]:
        assert ranks == settings.ranks
        found.append(settings)
        return [RESULT]

    monkeypatch.setattr(local, "launch", remember)
    return found


@pytest.fixture(autouse=True)
def small_host() -> Any:
    """A sharding type and the built-in commands, whatever is installed."""
    rows = make_class(ShardingType, "rows_by_hand", aliases=("by_hand",))
    small = make_plugin({"shardwright_sharding_types": lambda: [rows]})
    plugins = {"small": small, "commands": shardwright_plugins.commands}
    with use_host(PluginHost(entry_points=[], plugins=plugins, environment={})) as host:
        yield host


def refusal(*arguments: str) -> ShardwrightError:
    """The error that the command ends with."""
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert isinstance(result.exception, ShardwrightError), (result.exception, result.output)
    return result.exception


@pytest.mark.parametrize("option", ["--ranks", "--steps", "--batch-size", "--seed", "--checkpoint-every"])
def test_demo_count_below_the_least_is_a_usage_error(option: str, launched: list[DemoSettings]) -> None:
    assert CliRunner().invoke(app, ["demo", option, "-3"]).exit_code == 2
    assert launched == []


def test_demo_seed_that_torch_does_not_take_is_a_usage_error(launched: list[DemoSettings]) -> None:
    assert CliRunner().invoke(app, ["demo", "--seed", str(2**63)]).exit_code == 2
    assert launched == []


def test_demo_without_torchmetrics_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, launched: list[DemoSettings]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refusal("--steps", "1")
    assert isinstance(error, UnsupportedError)
    assert "shardwright[demo]" in str(error)
    assert launched == []


def test_demo_more_ranks_than_examples_is_refused() -> None:
    assert isinstance(refusal("--ranks", "3", "--batch-size", "2"), InvalidInputError)


@pytest.mark.parametrize("option", [("--resume",), ("--restarts", "2")])
def test_demo_that_would_go_on_without_checkpoints_is_refused(option: tuple[str, ...]) -> None:
    assert "--checkpoint DIR" in str(refusal(*option))


def test_demo_unknown_type_is_refused_with_the_nearest() -> None:
    error = refusal("--types", "by_hand,rows_by_hnad")
    assert isinstance(error, UnknownPluginError)
    assert "Did you mean 'rows_by_hand'?" in str(error)


def test_demo_too_few_devices_are_refused() -> None:
    error = refusal("--device", "dog", "--ranks", "3")
    assert isinstance(error, UnsupportedError)
    assert "3 ranks need as many devices" in str(error)


def test_demo_unwritable_json_is_refused(tmp_path: Path, launched: list[DemoSettings]) -> None:
    for path in (tmp_path / "no folder" / "x.json", tmp_path):
        assert isinstance(refusal("--json", str(path)), InvalidInputError)
    assert launched == []


def test_demo_options_become_settings_and_the_result_is_written(
    tmp_path: Path, launched: list[DemoSettings]
) -> None:
    path = tmp_path / "x.json"
    words = ["--ranks", "3", "--types", "by_hand,rows_by_hand", "--seed", "4", "--json", str(path)]
    result = CliRunner().invoke(app, ["demo", *words])
    assert result.exit_code == 0, result.output
    assert "this is 75.0% of it" in result.output
    assert launched == [attrs.evolve(DemoSettings(), ranks=3, types=("rows_by_hand",), seed=4)]
    assert '"auc": 0.6' in path.read_text()


def test_demo_starts_failed_ranks_again_from_the_newest_checkpoint_as_often_as_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resumed: list[bool] = []

    def fail(_: object, settings: DemoSettings, *, ranks: int) -> None:
        resumed.append(settings.resume)
        raise DistributedError("a rank was killed")

    monkeypatch.setattr(local, "launch", fail)
    assert isinstance(refusal("--restarts", "2", "--checkpoint", str(tmp_path)), DistributedError)
    assert resumed == [False, True, True]


def test_demo_that_begins_anew_refuses_a_folder_with_checkpoints(
    tmp_path: Path, launched: list[DemoSettings]
) -> None:
    (tmp_path / "step_0000000005").mkdir()
    assert isinstance(refusal("--checkpoint", str(tmp_path)), InvalidInputError)
    assert launched == []
    assert CliRunner().invoke(app, ["demo", "--checkpoint", str(tmp_path), "--resume"]).exit_code == 0
    assert len(launched) == 1


def test_demo_interrupted_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "launch", interrupt)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 130
