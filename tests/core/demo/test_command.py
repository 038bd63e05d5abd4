"""What the command refuses before it starts anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwright import hookimpl
from shardwright.cli import app
from shardwright.cli.demo import launch
from shardwright.cli.demo.settings import DEFAULT_SYNTHETIC_STEPS, DemoSettings
from shardwright.contracts import CommBackend
from shardwright.errors import InvalidInputError, ShardwrightError, UnknownNameError, UnknownPluginError
from shardwright.plugins import PluginHost, use_host


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> list[DemoSettings]:
    launched: list[DemoSettings] = []

    def remember(entrypoint: object, settings: DemoSettings, ranks: int) -> str:
        assert ranks == settings.ranks
        launched.append(settings)
        return "the result"

    monkeypatch.setattr(launch, "launch", remember)
    return launched


@pytest.fixture(autouse=True)
def small_host(plugin_of: Callable[..., Any], sharding_type: Callable[..., type]) -> Any:
    """A sharding type and a comm backend, whatever is installed."""
    backend = type(CommBackend)(
        "Wires", (CommBackend,), {"name": "wires", "devices": ("cpu", "dog"), "connect": lambda *_: None}
    )
    plugin = plugin_of(sharding_type("rows_by_hand", aliases=("by_hand",)))
    plugin.shardwright_comm_backends = hookimpl(lambda: [backend])
    with use_host(PluginHost(entry_points=[], plugins={"small": plugin}, environment={})) as host:
        yield host


def refusal(*arguments: str) -> ShardwrightError:
    """The error that the command ends with."""
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert isinstance(result.exception, ShardwrightError), (result.exception, result.output)
    return result.exception


@pytest.mark.parametrize("option", ["--ranks", "--steps", "--batch-size"])
@pytest.mark.parametrize("value", ["0", "-3"])
def test_demo_count_below_one_is_refused(option: str, value: str) -> None:
    error = refusal(option, value)
    assert isinstance(error, InvalidInputError)
    assert str(error) == f"{option} must be at least 1, got {value}."


def test_demo_seed_that_torch_does_not_take_is_refused() -> None:
    error = refusal("--seed", str(2**63))
    assert isinstance(error, InvalidInputError)
    assert str(error) == f"--seed must be at most {2**63 - 1}, got {2**63}."


def test_demo_small_batches_are_not_evaluated_one_by_one() -> None:
    assert DemoSettings(batch_size=2).evaluation_batch_size == 4096
    assert DemoSettings(batch_size=5000).evaluation_batch_size == 5000


def test_demo_more_ranks_than_examples_is_refused() -> None:
    assert "3 ranks cannot share it. Give at least 3." in str(refusal("--ranks", "3", "--batch-size", "2"))


def test_demo_unknown_type_is_refused_with_the_nearest() -> None:
    error = refusal("--types", "by_hand,rows_by_hnad")
    assert isinstance(error, UnknownPluginError)
    assert "'rows_by_hnad'" in str(error)
    assert "Did you mean 'rows_by_hand'?" in str(error)


def test_demo_no_type_is_refused() -> None:
    assert "names no sharding type. Known: rows_by_hand." in str(refusal("--types", " ,"))


def test_demo_unknown_device_is_refused_with_the_nearest() -> None:
    error = refusal("--device", "dgo")
    assert isinstance(error, UnknownNameError)
    assert "Known: cpu, dog. Did you mean 'dog'?" in str(error)


def test_demo_too_few_devices_are_refused() -> None:
    error = refusal("--device", "dog", "--ranks", "3")
    assert re.search(r"--device dog: 3 ranks need as many devices, and torch \S+ finds 0 here", str(error))


def test_demo_missing_data_is_refused(tmp_path: Path) -> None:
    assert "there is no such file" in str(refusal("--data", str(tmp_path / "nowhere.tsv")))


def test_demo_file_without_option_is_refused() -> None:
    assert str(refusal("day_0")) == "unexpected argument 'day_0'. Files are given as --data day_0."


def test_demo_unwritable_json_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no folder" / "x.json", tmp_path):
        error = refusal("--json", str(path))
        assert f"--json {path}: cannot be written" in str(error)


def test_demo_json_is_checked_without_leaving_a_file(
    tmp_path: Path, nothing_is_launched: list[DemoSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        assert list(tmp_path.iterdir()) == []
        raise InvalidInputError("stopped")

    monkeypatch.setattr(launch, "launch", stop)
    assert str(refusal("--json", str(tmp_path / "x.json"))) == "stopped"
    assert list(tmp_path.iterdir()) == []


def test_demo_options_become_settings(tmp_path: Path, nothing_is_launched: list[DemoSettings]) -> None:
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_text("something")
    paths = list(map(str, files))
    arguments = [
        "--ranks",
        "3",
        "--data",
        paths[0],
        paths[1],
        "--data",
        paths[2],
        "--types",
        "by_hand,rows_by_hand",
    ]
    result = CliRunner().invoke(app, ["demo", *arguments, "--skip-bad-lines", "--seed", "4"])
    assert result.exit_code == 0, result.output
    assert result.output == "the result\n"
    (settings,) = nothing_is_launched
    assert (settings.ranks, settings.seed, settings.skip_bad_lines) == (3, 4, True)
    assert sorted(settings.data) == files
    assert settings.types == ("rows_by_hand",)
    assert settings.steps is None


def test_settings_default_steps_are_of_drawn_examples_only() -> None:
    assert DemoSettings().steps == DEFAULT_SYNTHETIC_STEPS
    assert DemoSettings(data=(Path("x"),)).steps is None
    assert DemoSettings(steps=3).steps == 3


def test_demo_interrupted_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "launch", interrupt)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 130
