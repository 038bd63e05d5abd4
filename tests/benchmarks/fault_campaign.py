"""How long the other ranks take to raise when one is stopped, killed or fails, at drawn moments of a job.

python -m tests.benchmarks.fault_campaign [--trials 230] [--seed 0] [--timeout 5] [--output faults.json]
python -m tests.benchmarks.fault_campaign --faults stop [--output stops.json]

The whole campaign is both. With --output, a run that was ended goes on after the last trial in the file.

A trial is a job of 2 to 4 real processes over gloo: the process group starts, a plan is made, the model is sharded and
trained, its state is gathered, checkpoints are saved and loaded, the model is resharded, and it ends. In one of these
stages the fault befalls the *victim*: rank 0 with the process that serves the store, or another rank. The store is
served by rank 0, by a process of its own as torchrun's agent does (stopped and killed with rank 0), or is a file. For
each survivor is written down how long it took from the fault to its error, and to the end of its process.

A survivor is *late* if it raises more than the time-out after the fault, or its own first wait after that. An error is
*unnamed* if it names neither the victim nor the store. What torch itself waits for, while the process group starts, is
counted apart.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import torch
import torch._dynamo  # as DistributedDataParallel does: imported once, before ranks are forked
import torch.distributed as dist
from tests.ports import own_port

import shardwright as sw
import shardwright.planning.planner
import shardwright.runtime.routed.tables
import shardwright_plugins.dataflows.replicated.tables  # noqa: F401 - before ranks are forked, as the others
from shardwright.host import host

# How long each takes about, in seconds, so that all of it is struck.
STAGES = {
    "start": 0.1,
    "connect": 0.4,
    "plan": 0.5,
    "shard": 0.1,
    "first step": 0.05,
    "steps": 0.4,
    "state": 0.03,
    "save": 0.2,
    "load": 0.05,
    "reshard": 0.05,
    "end": 0.02,
}
FAULTS = ("stop", "kill", "raise")
STORES = ("rank 0", "agent", "file")
KINDS = {"row": "row_wise", "table": "table_wise", "copy": "data_parallel"}
OTHER_KINDS = {"row": "table_wise", "table": "row_wise", "copy": "data_parallel"}
NUM_STEPS = 12
NUM_SAVES = 4
_STEP_S = 0.02  # a step takes so long, so that faults strike within steps
_PLAN_S = 0.4  # the planner's rank takes about so long, so that it may be struck there
_LONGEST_STAGE_S = 30.0  # time for the victim to come to its stage (taste: a busy machine)
_SLACK_S = (
    30.0  # a survivor that has not raised this long after the time-out hangs; gloo may connect for 25 s
)
_TARDY_S = 0.5  # what a busy machine is allowed


@attrs.frozen
class Trial:
    """What befalls whom, when."""

    number: int
    ranks: int
    store: str
    victim: int
    fault: str
    stage: str
    delay_s: float
    timeout_s: float

    @classmethod
    def draw(cls, number: int, seed: int, options: argparse.Namespace) -> Trial:
        """The trial of that number: the same for the same seed."""
        drawn = random.Random(f"{seed}/{number}")
        ranks = drawn.choice((2, 3, 4))
        stage = drawn.choice(options.stages)
        return cls(
            number,
            ranks,
            drawn.choice(options.stores),
            drawn.choice((0, drawn.randrange(1, ranks))),
            drawn.choice(options.faults),
            stage,
            drawn.uniform(0.0, STAGES[stage]),
            options.timeout,
        )

    @property
    def struck(self) -> str:
        """Who is struck."""
        if self.victim:
            return "another"
        return "agent + rank 0" if self.store == "agent" and self.fault != "raise" else "rank 0"


@attrs.frozen
class Place:
    """Where the ranks of a trial find each other, and what they save."""

    folder: Path
    port: int

    @property
    def saved(self) -> Path:
        """The folder of their checkpoints."""
        return self.folder / "saved"


class Clicks(torch.nn.Module):
    """Tables of three sharding types, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = sw.EmbeddingBagCollection(
            [
                sw.EmbeddingBagConfig(name=name, num_embeddings=100, embedding_dim=16, feature_names=[name])
                for name in ("row", "table", "copy")
            ],
            device="meta",
        )
        self.over = torch.nn.Sequential(torch.nn.Linear(48, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, features: sw.KeyedJaggedTensor) -> torch.Tensor:
        """One value for each sample."""
        return self.over(self.bags(features).values()).squeeze(1)


def _planner(kinds: Mapping[str, str], plan_s: float = _PLAN_S) -> sw.EmbeddingShardingPlanner:
    constraints = {
        name: sw.ParameterConstraints(sharding_types=[kind], compute_kernels=["fused_torch"])
        for name, kind in kinds.items()
    }
    return sw.EmbeddingShardingPlanner(
        batch_size=4, constraints=constraints, listener=lambda progress: time.sleep(plan_s / 8)
    )


def _job(trial: Trial, rank: int, place: Place) -> Iterator[str]:
    """A rank's life; yields the name of each stage as it begins."""
    yield "start"
    timeout = timedelta(seconds=trial.timeout_s)
    if trial.store == "file":
        store = dist.FileStore(str(place.folder / "store"), trial.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.ranks, timeout=timeout)
    else:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(place.port), RANK=str(rank), WORLD_SIZE=str(trial.ranks)
        )
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(trial.store == "agent")
        dist.init_process_group("gloo", timeout=timeout)
    yield "connect"
    env = sw.ShardingEnv.from_process_group()
    torch.manual_seed(0)
    model: torch.nn.Module = Clicks()
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": 0.1})]
    yield "plan"
    plan = _planner(KINDS).collective_plan(model, sharders)
    yield "shard"
    model = sw.DistributedModelParallel(model, env, plan=plan, sharders=sharders)
    yield "first step"
    _step(model, rank)
    other = _planner(OTHER_KINDS, plan_s=0.0).collective_plan(Clicks(), sharders)
    yield "steps"
    for _ in range(NUM_STEPS):
        time.sleep(_STEP_S)
        _step(model, rank)
    yield "state"
    model.full_state_dict()
    model.fused_optimizer.full_state_dict()
    yield "save"
    for step in range(NUM_SAVES):
        sw.save_checkpoint(place.saved, model, step=step, keep=1, asynchronous=step % 2 == 1).wait()
    yield "load"
    sw.load_checkpoint(place.saved, model)
    yield "reshard"
    model.reshard(other)
    yield "end"
    dist.destroy_process_group()


def _step(model: torch.nn.Module, rank: int) -> None:
    features = sw.KeyedJaggedTensor(
        ["row", "table", "copy"], torch.arange(12) * 7 + rank, lengths=torch.ones(12, dtype=torch.int64)
    )
    model(features).sum().backward()


def _be_rank(trial: Trial, rank: int, place: Place, told: Connection) -> None:
    """A rank's process; says when a stage begins, and what it raised."""
    signal.signal(signal.SIGUSR1, _struck)
    torch.set_num_threads(1)
    try:
        for stage in _job(trial, rank, place):
            told.send((stage, time.monotonic(), ""))
    except BaseException as error:
        told.send(("raised", time.monotonic(), f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    told.send(("done", time.monotonic(), ""))


class _Struck(Exception):
    """What befalls a victim that raises: nothing that a library catches, as ``Path.exists`` does a ``ValueError``."""


def _struck(*_: Any) -> None:
    raise _Struck("struck")


def _be_agent(place: Place, told: Connection) -> None:
    """Serve the store as torchrun's agent does."""
    store = dist.TCPStore("127.0.0.1", place.port, None, True, wait_for_workers=False)
    told.send(("up", time.monotonic(), ""))
    while True:
        time.sleep(1.0)
        assert store is not None


@attrs.define
class Life:
    """What became of one process."""

    process: Any
    told: Connection
    stages: dict[str, float] = attrs.field(factory=dict)
    text: str = ""

    def hear(self, seconds: float) -> None:
        """Take the next thing that it says, if it does in time."""
        if self.told.poll(seconds):
            try:
                what, when, text = self.told.recv()
            except EOFError:
                what, when, text = "gone", time.monotonic(), ""
            self.stages.setdefault(what, when)
            self.text = text or self.text

    @property
    def is_over(self) -> bool:
        return bool({"raised", "done", "gone"} & self.stages.keys())

    def end(self, seconds: float) -> tuple[float | None, int | None]:
        """When the process ended, and its exit code; ended by force where it did not by itself."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            return None, None
        return time.monotonic(), self.process.exitcode


def run(trial: Trial) -> dict[str, Any]:
    """Carry a trial out; what became of each survivor."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), own_port())
        agent = _start(context, _be_agent, place) if trial.store == "agent" else None
        if agent:
            agent.hear(30.0)
        lives = [_start(context, _be_rank, trial, rank, place) for rank in range(trial.ranks)]
        struck_at = _strike(trial, lives, agent)
        survivors = {rank: life for rank, life in enumerate(lives) if rank != trial.victim}
        _listen(survivors.values(), struck_at + trial.timeout_s + _SLACK_S)
        ends = {
            rank: life.end(trial.timeout_s + _SLACK_S if life.is_over else 0.1)
            for rank, life in survivors.items()
        }
        for life in [*lives, *filter(None, [agent])]:
            if life.process.exitcode is None:
                life.process.kill()
                life.process.join()
        found = [_found(trial, rank, life, struck_at, *ends[rank]) for rank, life in survivors.items()]
        for _ in STAGES:
            lives[trial.victim].hear(0)
        return {
            **attrs.asdict(trial),
            "struck": trial.struck,
            "victim_raised": lives[trial.victim].text,
            "survivors": found,
        }


def _start(context: Any, function: Any, *arguments: Any) -> Life:
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return Life(process, ours)


def _strike(trial: Trial, lives: Sequence[Life], agent: Life | None) -> float:
    """Wait until the victim's stage has begun, and strike."""
    victim, deadline = lives[trial.victim], time.monotonic() + _LONGEST_STAGE_S
    while trial.stage not in victim.stages and not victim.is_over and time.monotonic() < deadline:
        victim.hear(0.1)
    time.sleep(trial.delay_s)
    number = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "raise": signal.SIGUSR1}[trial.fault]
    if agent and trial.victim == 0 and trial.fault != "raise":
        os.kill(agent.process.pid, number)
    struck_at = time.monotonic()
    if victim.process.is_alive():
        os.kill(victim.process.pid, number)
    return struck_at


def _listen(lives: Any, deadline: float) -> None:
    """Hear all that is said until all have raised, or ended, or time is up."""
    while True:
        pending = {life.told: life for life in lives if not life.is_over}
        if not pending or time.monotonic() > deadline:
            return
        for told in wait(list(pending), 0.5):
            pending[told].hear(0)  # type: ignore[index]


def _found(
    trial: Trial, rank: int, life: Life, struck_at: float, ended_at: float | None, code: int | None
) -> dict[str, Any]:
    """One survivor's end."""
    begun = [stage for stage in STAGES if stage in life.stages]
    outcome = next((what for what in ("raised", "done", "gone") if what in life.stages), "hangs")
    raised_s = life.stages[outcome] - struck_at if outcome != "hangs" else None
    # It may have come to a wait only after the fault.
    waiting_since = max(life.stages[begun[-1]] - struck_at, 0.0) if begun else 0.0
    longest_s = waiting_since + trial.timeout_s + STAGES.get(trial.stage, 0.0) + _TARDY_S
    return {
        "rank": rank,
        "outcome": outcome,
        "stage": begun[-1] if begun else "",
        "raised_s": raised_s,
        "is_unnamed": outcome == "raised" and not _names(trial.victim, rank, life.text),
        "is_late": raised_s is None or (outcome == "raised" and raised_s > longest_s),
        "ended_s": None if ended_at is None else ended_at - struck_at,
        "exit_code": code,
        "text": life.text,
    }


def _names(victim: int, rank: int, text: str) -> bool:
    """Whether an error of a rank names the victim, or says that the store does not answer."""
    # Its own number stands in front.
    said = text.replace(f"rank {rank}: ", "", 1)
    named = {
        int(number)
        for numbers in re.findall(r"ranks? (\d+(?:, \d+)*)", said)
        for number in numbers.split(", ")
    }
    return victim in named or "the process group's store" in said


def _print_trial(result: dict[str, Any]) -> None:
    head = "{number:4d} {ranks} ranks, store {store:7s} {fault:5s} of {struck:15s} in {stage:10s}".format(
        **result
    )
    for own in result["survivors"]:
        seconds = "   -  " if own["raised_s"] is None else f"{own['raised_s']:5.2f}s"
        ended = "never" if own["ended_s"] is None else f"{own['ended_s']:.2f}s"
        late = ("LATE " if own["is_late"] else "") + ("UNNAMED " if own["is_unnamed"] else "")
        print(
            f"{head} | rank {own['rank']} {late}{own['outcome']:6s} {seconds} in {own['stage']:10s} "
            f"end {ended} code {own['exit_code']} {own['text'][:160]}",
            flush=True,
        )


def _waits_for_torch(own: Mapping[str, Any]) -> bool:
    """Whether a survivor waited inside torch, which was making a process group: that has time-outs of its own."""
    return own["stage"] == "start" or any(
        what in own["text"] for what in ("connectFullMesh", "making a process group")
    )


def _print_totals(results: Sequence[dict[str, Any]]) -> None:
    found = [own for result in results for own in result["survivors"]]
    late = [own for own in found if own["is_late"] or own["is_unnamed"] or own["outcome"] == "hangs"]
    ours = [own for own in late if not _waits_for_torch(own)]
    counted = {
        "raised": sum(own["outcome"] == "raised" for own in found),
        "ended well": sum(own["outcome"] == "done" for own in found),
        "hung": sum(own["outcome"] == "hangs" for own in ours),
        "late": sum(own["is_late"] for own in ours),
        "unnamed": sum(own["is_unnamed"] for own in ours),
        "hung, late or unnamed while torch made a process group": len(late) - len(ours),
    }
    told = ", ".join(f"{count} {what}" for what, count in counted.items())
    print(f"{len(results)} trials, {len(found)} survivors: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=230)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=5.0, help="the process group's, in seconds")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    for kind in (host().comm_backends, host().sharding_types, host().compute_kernels, host().proposers):
        list(kind)  # imports plugins, once
    torch.set_num_threads(1)
    has_begun = options.output and options.output.exists()
    results = json.loads(options.output.read_text()) if has_begun else []
    for number in range(options.first + len(results), options.first + options.trials):
        results.append(run(Trial.draw(number, options.seed, options)))
        _print_trial(results[-1])
        if options.output:
            options.output.write_text(json.dumps(results, indent=1))
    _print_totals(results)


if __name__ == "__main__":
    sys.exit(main())
