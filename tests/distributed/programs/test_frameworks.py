"""The programs of the page on frameworks: what they print is what the demo's own loop comes to."""

from __future__ import annotations

import importlib.util
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests import readme, stranger

import shardwright as sw
import shardwright_plugins
from shardwright_plugins.commands.demo.examples import Clicks
from shardwright_plugins.commands.demo.model import Batch, ShardedDLRM
from shardwright_plugins.commands.demo.settings import DemoSettings
from shardwright_testing.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PAGE = Path(shardwright_plugins.__file__).parent / "docs" / "frameworks.md"
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
]
LAUNCHERS = {
    "accelerate": [*ACCELERATE, "--mixed_precision", "no", "--main_process_port", "0"],
    "lightning": [],
}


def mean_losses(steps: int) -> list[float]:
    """Mean loss over the ranks in each step of the demo's own loop."""
    torch.set_num_threads(1)
    ranks, device = dist.get_world_size(), torch.device("cpu")
    settings = DemoSettings(ranks=ranks, steps=steps, batch_size=512)
    source = Clicks(settings.seed, settings.batch_size)
    env = sw.ShardingEnv.from_process_group(device_type="cpu")
    model = ShardedDLRM(source.tables, settings, env, device)
    losses = [
        model.train_step(Batch.of(examples, source.tables, device))
        for examples in islice(source.training_batches(env.rank, ranks), steps)
    ]
    told = torch.tensor(losses)
    dist.all_reduce(told)
    return (told / ranks).tolist()


@pytest.mark.parametrize("framework", LAUNCHERS)
def test_framework_trains_saves_and_resumes_as_the_demos_own_loop(
    framework: str, tmp_path: Path, pool: RankPool
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    program = tmp_path / f"{framework}_demo.py"
    program.write_text(readme.source(program.name, PAGE))
    expected = pool.run(mean_losses, 2, 40)[0]
    for first, last, more in ((0, 20, []), (20, 40, ["resume"])):
        done = stranger.run_python(
            *LAUNCHERS[framework], str(program), str(tmp_path / "saved"), str(last), *more
        )
        assert done.returncode == 0, done.stderr
        found = re.search(rf"^steps {first} to {last}, loss ([0-9.]+)$", done.stdout, re.MULTILINE)
        assert found, done.stdout
        assert float(found[1]) == pytest.approx(expected[last - 1], abs=2e-4)
