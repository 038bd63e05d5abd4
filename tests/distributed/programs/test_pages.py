"""Programs of tutorials and how-to pages: they print what the pages show, and launchers get what torchrun takes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests import readme, stranger
from torch.distributed.run import get_args_parser

TWO_RANKS = readme.CORE_DOCS / "tutorials/two_ranks.md"
CLUSTER = readme.CORE_DOCS / "tutorials/plan_a_cluster.md"
LAUNCH = readme.CORE_DOCS / "howto/launch.md"
RECIPES = readme.CORE_DOCS / "howto/recipes.md"
TRACKING = readme.CORE_DOCS / "howto/track_training.md"
REPORT = readme.CORE_DOCS / "howto/read_a_plan.md"
MANY = readme.CORE_DOCS / "howto/many_ranks.md"
FROM_A_FILE = readme.CORE_DOCS / "howto/plan_from_a_file.md"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ONE_PROCESS = ["-W", "error"]
PROGRAMS = {
    "notebook.py": (readme.CORE_DOCS / "howto/several_ranks.md", ONE_PROCESS),
    "checkpoint.py": (readme.CORE_DOCS / "howto/save_and_load.md", ONE_PROCESS),
    "parquet.py": (readme.CORE_DOCS / "howto/parquet.md", ONE_PROCESS),
    "mixed_precision.py": (RECIPES, ONE_PROCESS),
    "frozen.py": (RECIPES, ONE_PROCESS),
    "maximum.py": (RECIPES, ONE_PROCESS),
    "leave_alone.py": (RECIPES, ONE_PROCESS),
    "weights_only.py": (RECIPES, ONE_PROCESS),
    "schedule.py": (RECIPES, ONE_PROCESS),
    "proof.py": (readme.CORE_DOCS / "proofs.md", ONE_PROCESS),
    "fsdp.py": (RECIPES, TORCHRUN),
    "follow.py": (readme.BUILT_INS.with_name("following.md"), TORCHRUN),
    "metrics.py": (readme.BUILT_INS.with_name("frameworks.md"), TORCHRUN),
}
SECONDS = re.compile(r"\d[\d.]* s\b")
RESULT = re.compile(r"^steps .*$", re.MULTILINE)
# Stands for a launcher: prints what it was given, as JSON.
SHOWING = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


def pages_with_programs() -> dict[str, list[str]]:
    pages = [*(readme.CORE_DOCS / "tutorials").glob("*.md"), *(readme.CORE_DOCS / "howto").glob("*.md")]
    named = {
        page.name: [block.name for block in readme.blocks(page) if block.language == "python"]
        for page in pages
    }
    return {name: programs for name, programs in named.items() if programs}


def test_pages_have_no_program_that_is_not_run() -> None:
    assert pages_with_programs() == {
        "two_ranks.md": ["ratings.py", "plain.py", "movies.py"],
        "plan_a_cluster.md": ["sizes.py"],
        "to_a_server.md": ["ctr.py", "train.py", "export.py"],  # tests/contrib/serving/server
        "first_plugin.md": ["plan.py", "test_even_first.py"],  # tests/test_readme.py
        "several_ranks.md": ["notebook.py"],
        "save_and_load.md": ["checkpoint.py"],
        "parquet.md": ["parquet.py"],
        "launch.md": ["ray_train.py"],
        "recipes.md": [
            "mixed_precision.py",
            "frozen.py",
            "maximum.py",
            "leave_alone.py",
            "schedule.py",
            "weights_only.py",
            "fsdp.py",
        ],
        "track_training.md": ["track.py"],
        "read_a_plan.md": ["report.py"],
        "batch_sizes.md": ["ranked_items.py"],  # tests/plugins/test_docs.py, as the next two
        "reshard.md": ["reshard_rows.py"],
        "update_in_step.md": ["train_in_step.py"],
    }


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", PROGRAMS)
def test_page_program_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    page, words = PROGRAMS[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(readme.source(name, page))
    done = stranger.run_python(*words, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == readme.output_of(name, page)


# Stands for Weights & Biases: writes what it is given.
RECORDING = """
import json

class Run:
    def __init__(self):
        self.config, self.figures = {}, {}

    def log(self, figures, step):
        self.figures[step] = figures
        with open("recorded.json", "w") as file:
            json.dump([self.config, self.figures], file)

def init(project, mode):
    return Run()
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_tracking_by_wandb_gets_the_plan_and_falling_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("site").mkdir()
    Path("site/wandb.py").write_text(RECORDING)
    Path("track.py").write_text(readme.source("track.py", TRACKING))
    done = stranger.run_python(*TORCHRUN, "track.py", "wandb", site=tmp_path / "site")
    assert done.returncode == 0, done.stderr
    config, figures = json.loads(Path("recorded.json").read_text())
    assert "item" in config["plan"]
    assert list(figures) == ["20", "40", "60", "80", "100"]
    losses = [of_step["loss"] for of_step in figures.values()]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@pytest.mark.slow
def test_tracking_by_tensorboard_gets_the_plan_and_every_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    Path("track.py").write_text(readme.source("track.py", TRACKING))
    done = stranger.run_python("track.py", "tensorboard")
    assert done.returncode == 0, done.stderr
    read = events.EventAccumulator("runs").Reload()
    assert [event.step for event in read.Scalars("loss")] == [20, 40, 60, 80, 100]
    assert read.Tags()["tensors"] == ["plan/text_summary"]


def lines_of_any_rank(report: str) -> Counter[str]:
    """Lines of a report without seconds and numbers of ranks: of equally good plans, solvers' versions take others."""
    told = (SECONDS.sub("# s", line).rstrip() for line in report.splitlines())
    return Counter(re.sub(r"^ +\d+ +(?=\|)|\| [\d,-]+$", "", line) for line in told)


def test_report_has_the_lines_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(readme.source("report.py", REPORT), "report.py", "exec"), {})
    page = lines_of_any_rank(readme.output_of("report.py", REPORT))
    assert page.total() > 15
    assert page - lines_of_any_rank(capsys.readouterr().out) == Counter()


def test_plans_for_many_ranks_run_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardwright.cli import app

    monkeypatch.chdir(tmp_path)
    Path("tables.json").write_text(readme.source("tables.json", FROM_A_FILE))
    commands = "".join(block.text for block in readme.blocks(MANY) if block.language == "console")
    lines = [line.removeprefix("$ shardwright ") for line in commands.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert not app(line.split(), standalone_mode=False), line
    assert len(json.loads(Path("plan.json").read_text())["modules"]) == 1
    assert "averag" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
def test_tutorial_trains_loses_a_rank_and_goes_on_with_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ratings.py", "plain.py", "movies.py"):
        Path(name).write_text(readme.source(name, TWO_RANKS))
    shown = RESULT.findall(TWO_RANKS.read_text())
    plain = stranger.run_python("plain.py")
    assert plain.stdout == readme.output_of("plain.py", TWO_RANKS), plain.stderr

    def train(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return stranger.run_python(*torchrun, "movies.py", *arguments)

    assert train(2, "--reshard-at", "120").stdout.splitlines() == shown[2:] == shown[:1]
    for step in ("200", "300"):
        for file in Path(f"checkpoints/step_0000000{step}").iterdir():
            file.unlink()
        Path(f"checkpoints/step_0000000{step}").rmdir()
    assert train(2, "--kill-at", "150").returncode != 0
    assert [path.name for path in Path("checkpoints").glob("step_*")] == ["step_0000000100"]
    assert train(3).stdout.splitlines() == shown[1:2]


def test_cluster_tutorial_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardwright.cli import app

    monkeypatch.chdir(tmp_path)
    for name in ("feed.json", "sizes.py"):
        Path(name).write_text(readme.source(name, CLUSTER))
    commands = "".join(block.text for block in readme.blocks(CLUSTER) if block.language == "console")
    lines = [line.removeprefix("$ shardwright ") for line in commands.splitlines()]
    assert len(lines) == 5
    for line in lines:
        assert not app(line.split(), standalone_mode=False), line
    capsys.readouterr()
    exec(compile(Path("sizes.py").read_text(), "sizes.py", "exec"), {})
    small, middle, large = capsys.readouterr().out.splitlines()
    assert small.endswith("['user_id']")
    assert middle.endswith("[]")
    assert large.endswith("[]")


def launched(tmp_path: Path, script: str, **environment: str) -> list[str]:
    """Arguments of the launcher that a script starts."""
    for name in ("torchrun", "srun", "torchx"):
        (tmp_path / name).write_text(SHOWING)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'host-1\\nhost-2\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "script").write_text(script)
    done = subprocess.run(
        ["/bin/bash", "-u", str(tmp_path / "script")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    arguments: list[str] = json.loads(done.stdout)
    return arguments


def test_launch_on_one_host_gives_torchrun_what_it_takes(tmp_path: Path) -> None:
    taken = get_args_parser().parse_args(launched(tmp_path, readme.source("torchrun.sh", LAUNCH), RANKS="4"))
    assert (taken.standalone, taken.nproc_per_node, taken.training_script) == (True, "4", "train.py")


def test_launch_by_slurm_gives_torchrun_what_it_takes(tmp_path: Path) -> None:
    script = readme.source("train.sbatch", LAUNCH)
    of_slurm = {
        "SLURM_JOB_NODELIST": "host-[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "64",
    }
    *of_srun, command = " ".join(launched(tmp_path, script, **of_slurm)).split(" torchrun ")
    assert of_srun == ["--cpus-per-task 64"]
    assert "#SBATCH --cpus-per-task=64" in script
    taken = get_args_parser().parse_args(command.split())
    assert (taken.nnodes, taken.nproc_per_node, taken.rdzv_id) == ("2", "8", "7")
    assert (taken.rdzv_backend, taken.rdzv_endpoint) == ("c10d", "host-1:29400")


def test_launch_on_kubernetes_gives_torchrun_what_it_takes() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(readme.source("train.yaml", LAUNCH))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    taken = get_args_parser().parse_args(container["args"])
    hosts = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == hosts == int(taken.nnodes)
    assert int(taken.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert taken.rdzv_endpoint.split(":")[0] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_launch_by_torchx_asks_for_the_hosts_and_ranks_of_the_page(tmp_path: Path) -> None:
    taken = launched(tmp_path, readme.source("torchx.sh", LAUNCH), SCHEDULER="local_cwd")
    assert taken[:4] == ["run", "--scheduler", "local_cwd", "dist.ddp"]
    if importlib.util.find_spec("torchx") is None:
        return  # its own parser has the last word
    from torchx.components.dist import ddp
    from torchx.specs.builders import materialize_appdef

    (role,) = materialize_appdef(ddp, taken[4:]).roles
    assert (role.num_replicas, role.max_retries) == (2, 3)
    assert "--nnodes 2 --nproc_per_node 8" in role.args[-1]


@pytest.mark.slow
@pytest.mark.distributed
def test_launch_by_ray_trains_on_two_ranks(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    (tmp_path / "ray_train.py").write_text(readme.source("ray_train.py", LAUNCH))
    done = stranger.run_python(str(tmp_path / "ray_train.py"), RAY_USAGE_STATS_ENABLED="0")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ranks: 2" in done.stdout + done.stderr


def test_moving_from_torchrec_names_what_there_is() -> None:
    import shardwright as sw

    page = (readme.CORE_DOCS / "howto/from_torchrec.md").read_text()
    ours = [row.split("|")[2] for row in page.splitlines() if row.startswith("| ") and "---" not in row]
    theirs = [row.split("|")[1] for row in page.splitlines() if "| the same |" in row]
    named = re.findall(r"`(?:planner\.)?([A-Z]\w+)", "".join(ours + theirs))
    assert len(named) >= 20
    assert [name for name in named if not hasattr(sw, name)] == []
