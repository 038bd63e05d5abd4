"""What the command refuses before it starts anything."""

from __future__ import annotations

import gzip
import random
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.conftest import make_class, make_plugin
from typer.testing import CliRunner

import shardwright_plugins.commands
from shardwright import SavedCheckpoint
from shardwright.cli import app
from shardwright.contracts import CommBackend, ShardingType
from shardwright.errors import (
    DistributedError,
    InvalidInputError,
    ShardwrightError,
    UnknownNameError,
    UnknownPluginError,
    UnsupportedError,
)
from shardwright.host import PluginHost, use_host
from shardwright_plugins.commands.demo import criteo, rank
from shardwright_plugins.commands.demo.result import DemoResult
from shardwright_plugins.commands.demo.settings import DEFAULT_SYNTHETIC_STEPS, DemoSettings
from shardwright_plugins.launch import local

LINE = "\t".join(["0", *["7"] * 13, *["0000000a"] * 26]) + "\n"


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> list[DemoSettings]:
    launched: list[DemoSettings] = []

    def remember(entrypoint: object, settings: DemoSettings, *, ranks: int) -> list[str]:
        assert ranks == settings.ranks
        launched.append(settings)
        return ["the result"]

    monkeypatch.setattr(local, "launch", remember)
    return launched


@pytest.fixture(autouse=True)
def small_host() -> Any:
    """A sharding type, a comm backend and the built-in commands, whatever is installed."""
    backend = make_class(CommBackend, "wires", devices=("cpu", "dog"))
    rows = make_class(ShardingType, "rows_by_hand", aliases=("by_hand",))
    small = make_plugin(
        {"shardwright_sharding_types": lambda: [rows], "shardwright_comm_backends": lambda: [backend]}
    )
    plugins = {"small": small, "commands": shardwright_plugins.commands}
    with use_host(PluginHost(entry_points=[], plugins=plugins, environment={})) as host:
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


def test_demo_without_scikit_learn_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, nothing_is_launched: list[DemoSettings]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refusal("--steps", "1")
    assert isinstance(error, UnsupportedError)
    assert str(error).endswith("scikit-learn, which is not installed: pip install 'shardwright[demo]'")
    assert nothing_is_launched == []


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

    monkeypatch.setattr(local, "launch", stop)
    assert str(refusal("--json", str(tmp_path / "x.json"))) == "stopped"
    assert list(tmp_path.iterdir()) == []


def test_demo_options_become_settings(tmp_path: Path, nothing_is_launched: list[DemoSettings]) -> None:
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_text(f"something\n{LINE * 40}")
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
    assert result.output == (
        "data:         120 lines with tabs and no header: 13 steps of 8, 12 held out\n"
        "batch size:   8, as the data are few for 4,096; --batch-size chooses another\n"
        "the result\n"
    )
    (settings,) = nothing_is_launched
    assert (settings.ranks, settings.seed, settings.skip_bad_lines) == (3, 4, True)
    assert sorted(settings.data) == files
    assert settings.types == ("rows_by_hand",)
    assert (settings.steps, settings.batch_size) == (13, 8)


def lines_of(count: int) -> str:
    return LINE * count


def demo_on(path: Path, text: str, *arguments: str) -> str:
    """What the command prints of a file's text."""
    path.write_text(text)
    result = CliRunner().invoke(app, ["demo", "--data", str(path), *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize(
    ("count", "options", "steps", "batch_size"),
    [
        (200, (), 11, 16),
        (200, ("--batch-size", "60"), 3, 60),
        (200, ("--steps", "2"), 2, 16),
        (50_000, (), 10, 4096),
        (10, (), 4, 2),
    ],
)
def test_demo_says_how_many_steps_the_data_allow(
    tmp_path: Path,
    nothing_is_launched: list[DemoSettings],
    count: int,
    options: tuple[str, ...],
    steps: int,
    batch_size: int,
) -> None:
    output = demo_on(tmp_path / "a.tsv", lines_of(count), *options)
    allowed = (count - count // 10) // batch_size
    assert (
        f"data:         {count:,} lines with tabs and no header: {allowed:,} steps of {batch_size:,}, "
        f"{count // 10:,} held out\n"
    ) in output
    assert ("--batch-size chooses another" in output) == (options[:1] != ("--batch-size",) and count < 50_000)
    (settings,) = nothing_is_launched
    assert (settings.steps, settings.batch_size) == (steps, batch_size)


def test_demo_more_steps_than_the_data_allow_are_told(
    tmp_path: Path, nothing_is_launched: list[DemoSettings]
) -> None:
    output = demo_on(tmp_path / "a.tsv", lines_of(200), "--steps", "300")
    assert "steps:        300 were asked for; training ends with the data\n" in output
    assert nothing_is_launched[0].steps == 11


@pytest.mark.parametrize("packed", [False, True])
def test_demo_large_files_are_reckoned_from_their_first_lines(
    tmp_path: Path, nothing_is_launched: list[DemoSettings], monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(criteo, "_LINES_LOOKED_AT", 20_000)
    generator = random.Random(0)
    ids = (generator.randbytes(4 * 26).hex(" ", 4).replace(" ", "\t") for _ in range(60_000))
    head = "0" + "\t7" * 13
    text = "".join(f"{head}\t{line}\n" for line in ids).encode()
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(gzip.compress(text) if packed else text)
    arguments = [word for file in files for word in ("--data", str(file))]
    result = CliRunner().invoke(app, ["demo", *arguments, "--steps", "5"])
    assert result.exit_code == 0, result.output
    told = re.match(
        r"data: +about (\S+) lines .*: about (\S+) steps of 4,096, (\S+) held out\n", result.output
    )
    assert told, result.output
    lines, steps, held_out = (int(number.replace(",", "")) for number in told.groups())
    assert lines == pytest.approx(120_000, rel=0.15)
    assert (steps, held_out) == ((lines - lines // 10) // 4096, lines // 10)
    assert nothing_is_launched[0].steps == 5


@pytest.mark.parametrize(
    ("text", "options", "wrong"),
    [
        ("x\n" + LINE * 20, (), r"a\.tsv:1: expected 40 fields"),
        (LINE * 20, ("--batch-size", "19"), r"has 18 good lines to train on .* one batch of 19\."),
        (LINE * 9, (), r"fewer than 10 good lines: none is held out"),
        ("x\n" * 5, ("--skip-bad-lines",), r"0 good lines .*; 5 malformed ones are left out\), too few"),
        ("label,I1,I2\n0,1,2\n", (), r"a\.tsv: its header lacks I3, I4, I5, I6, I7 and 32 more"),
    ],
)
def test_demo_files_that_cannot_be_trained_on_are_refused_before_anything_starts(
    tmp_path: Path, nothing_is_launched: list[DemoSettings], text: str, options: tuple[str, ...], wrong: str
) -> None:
    (tmp_path / "a.tsv").write_text(text)
    assert re.search(wrong, str(refusal("--data", str(tmp_path / "a.tsv"), *options)))
    assert nothing_is_launched == []


def result_of(clicks: int, others: int, auc: float | None) -> DemoResult:
    count = clicks + others
    return DemoResult(
        auc=auc,
        best_auc=None,
        examples=1,
        examples_per_second=1.0,
        collectives_per_step=4,
        ranks=2,
        plan={},
        steps=1,
        training_seconds=1.0,
        held_out_examples=count,
        held_out_clicks=clicks,
        bad_lines=0,
    )


def test_result_of_few_examples_says_that_its_auc_means_nothing() -> None:
    text = str(result_of(clicks=5, others=15, auc=0.62))
    assert "AUC:          0.6200 over 20 held-out examples\n" in text
    # sqrt(21 / (12 * 5 * 15)) is 0.153.
    assert (
        "so few that it means nothing: chance alone gives 0.19 to 0.81. Give some 8,000 lines or more" in text
    )


def test_result_of_many_examples_says_nothing_of_chance() -> None:
    assert "chance" not in str(result_of(clicks=200, others=600, auc=0.62))
    assert "chance" in str(result_of(clicks=150, others=450, auc=0.62))
    assert "not defined, all have one label, over 20 held-out" in str(result_of(0, 20, None))


@settings(max_examples=20)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000))
def test_result_chance_deviation_is_that_of_scores_that_know_nothing(
    clicks: int, others: int, seed: int
) -> None:
    scores = np.random.default_rng(seed).random((4000, clicks + others))
    is_above = (
        scores[:, :clicks, None] > scores[:, None, clicks:]
    )  # the AUC: how often clicks score above others
    spread = is_above.mean(axis=(1, 2)).std()
    assert result_of(clicks, others, 0.5).chance_deviation == pytest.approx(spread, rel=0.1)


def test_settings_default_steps_are_of_drawn_examples_only() -> None:
    assert DemoSettings().steps == DEFAULT_SYNTHETIC_STEPS
    assert DemoSettings(data=(Path("x"),)).steps is None
    assert DemoSettings(steps=3).steps == 3


def test_demo_starts_failed_ranks_again_from_the_newest_checkpoint_as_often_as_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resumed: list[bool] = []

    def fail(_: object, settings: DemoSettings, *, ranks: int) -> None:
        resumed.append(settings.resume)
        raise DistributedError("a rank was killed")

    monkeypatch.setattr(local, "launch", fail)
    done = CliRunner().invoke(app, ["demo", "--restarts", "2", "--checkpoint", str(tmp_path)])
    assert isinstance(done.exception, DistributedError)
    assert resumed == [False, True, True]


def test_demo_that_begins_anew_refuses_a_folder_with_checkpoints(
    tmp_path: Path, nothing_is_launched: list[DemoSettings]
) -> None:
    (tmp_path / "step_0000000005").mkdir()
    arguments = ["demo", "--checkpoint", str(tmp_path)]
    assert isinstance(CliRunner().invoke(app, arguments).exception, InvalidInputError)
    assert nothing_is_launched == []
    assert CliRunner().invoke(app, [*arguments, "--resume"]).exit_code == 0
    assert len(nothing_is_launched) == 1


def test_demo_interrupted_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "launch", interrupt)
    assert CliRunner().invoke(app, ["demo"]).exit_code == 130


def test_demo_says_how_far_the_last_checkpoint_is_until_it_is_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank, "_BETWEEN_NEWS_S", 0.01)
    work: Future[None] = Future()
    told: list[str] = []

    def tell() -> None:
        told.append("saving")
        if len(told) == 3:
            work.set_result(None)

    rank.wait_with_news(SavedCheckpoint(tmp_path, 1, work), tell)
    assert told == ["saving"] * 3
