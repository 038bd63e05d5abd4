"""Measure a pipeline's steps: `python -m tests.pictures.timeline` writes the `timeline.json` of the picture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright_plugins.launch import launch

FILE = Path(__file__).with_name("timeline.json")
STEPS, WARM_UP, BATCH, ROWS = 3, 10, 2048, 100_000


class Clicks(torch.nn.Module):
    """Eight tables and a small dense part."""

    def __init__(self) -> None:
        super().__init__()
        tables = [sw.EmbeddingBagConfig(ROWS, 64, f"t{i}", feature_names=[f"f{i}"]) for i in range(8)]
        self.bags = sw.EmbeddingBagCollection(tables)
        self.over = torch.nn.Sequential(
            torch.nn.Linear(8 * 64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
        )

    def forward(self, features: sw.KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.over(self.bags(features).values())
        return output.square().mean(), output.detach()


def batch(number: int) -> sw.KeyedJaggedTensor:
    drawn = torch.Generator().manual_seed(number)
    ids = torch.randint(ROWS, (8 * BATCH * 4,), generator=drawn)
    return sw.KeyedJaggedTensor([f"f{i}" for i in range(8)], ids, lengths=torch.full((8 * BATCH,), 4).int())


def spans() -> list[dict[str, Any]]:
    """Begin and end of each stage of some steps on this rank, ms since the ranks met."""
    from torch.profiler import ProfilerActivity, profile

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    by_rows = {"*": sw.ParameterConstraints(sharding_types=["row_wise"])}
    model = Clicks()
    plan = sw.EmbeddingShardingPlanner(batch_size=BATCH, constraints=by_rows).collective_plan(model)
    model = sw.DistributedModelParallel(model, plan=plan)
    dense = dict(sw.in_backward_optimizer_filter(model.named_parameters()))
    optimizer = sw.KeyedOptimizerWrapper(dense, lambda own: torch.optim.SGD(own, lr=0.1))
    pipeline = sw.TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    batches = iter([batch(2 * number + dist.get_rank()) for number in range(WARM_UP + STEPS + 3)])
    for _ in range(WARM_UP):
        pipeline.progress(batches)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as measured:
        for _ in range(STEPS):
            pipeline.progress(batches)
    events = [event for event in measured.events() if event.name.startswith("## ")]
    first = min(event.time_range.start for event in events)
    return [
        {
            "stage": event.name.strip("# "),
            "start_ms": round((event.time_range.start - first) / 1000, 3),
            "end_ms": round((event.time_range.end - first) / 1000, 3),
        }
        for event in events
    ]


if __name__ == "__main__":
    started = time.perf_counter()
    FILE.write_text(json.dumps({"ranks": launch(spans, ranks=2, timeout_s=200)}, indent=1) + "\n")
    print(FILE, f"{time.perf_counter() - started:.1f} s")
