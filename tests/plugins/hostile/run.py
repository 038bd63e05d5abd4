"""Gives the command line hostile documents and arguments, each within a time and a memory, and tells what is wrong.

`python -m tests.plugins.hostile.run 10000 1 plan workload` runs 10 000 cases of seed 1 of each kind, and prints those
that end in anything but a result or an error in words, or not in their time and memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from attrs import frozen
from tests.plugins.hostile import named
from tests.plugins.hostile.mutations import arguments, mutated

from shardwright import ShardingPlan, ShardwrightError
from shardwright.cli import main
from shardwright.host import PluginHost, use_host

CONTRIB = Path(__file__).parents[3] / "contrib"
MEMORY_BYTES = 3 << 30  # beside what the process had before its first case
SECONDS = 20.0  # of processor time a case
KINDS = ("plan", "workload", "constraints", "arguments", "named")

WORKLOAD: dict[str, Any] = {
    "name": "little",
    "batch_size_per_rank": 64,
    "source": "drawn",
    "tables": [
        {
            "name": "user",
            "num_embeddings": 20_000,
            "embedding_dim": 64,
            "num_features": 1,
            "pooling_factor": 3.0,
        },
        {
            "name": "item",
            "num_embeddings": 50_000,
            "embedding_dim": 128,
            "pooling_factors": [1.0, 20.0],
            "num_features": 2,
        },
        {
            "name": "shop",
            "num_embeddings": 1000,
            "embedding_dim": 32,
            "feature_names": ["s"],
            "module": "tower",
            "data_type": "FP16",
            "pooling": "MEAN",
            "is_weighted": True,
            "num_poolings": [2.0],
            "optimizer": {"name": "row_wise_adagrad", "learning_rate": 0.1, "eps": 1e-8},
            "qcomms_config": {"forward_precision": "fp16", "backward_precision": "bf16"},
            "cache": {"load_factor": 0.5, "algorithm": "lfu"},
        },
        {"name": "dealt", "num_embeddings": 999, "embedding_dim": 16, "optimizer": None},
        {"name": "hot", "num_embeddings": 5000, "embedding_dim": 32, "pooling": "NONE", "x-own": {"a": [1]}},
    ],
}
COUNTS = {"rows": [3, 1, 7], "counts": [500, 300, 100], "total": 1000}
CONSTRAINTS: dict[str, Any] = {
    "user": {"sharding_types": ["row_wise", "column_wise"], "min_partition": 32, "pooling_factors": [3.0]},
    "tower.*": {
        "compute_kernels": ["fused_torch", "fused", "fused_uvm_caching"],
        "ranks": [0, 1],
        "together": "a",
    },
    "dealt": {"sharding_types": ["round_robin"], "num_poolings": [1.0], "batch_sizes": [32]},
    "hot": {"sharding_types": ["hot_rows"], "extras": {"access_counts": COUNTS}},
    "*": {
        "device_group": "cuda",
        "cache_params": {
            "load_factor": 0.1,
            "algorithm": "lru",
            "stats": {
                "cacheability": 0.3,
                "expected_lookups": 10.0,
                "mrc_hist_counts": [1.0, 2.0],
                "height": 10,
            },
        },
        "qcomms_config": {"forward_precision": "fp16"},
    },
}
PLAN = {"--ranks": 4, "--local": 2, "--hbm-gib": 1, "--ddr-gib": 4, "--seconds": 1}
COMMANDS: dict[str, dict[str, Any]] = {
    "plan": {
        **PLAN,
        "--batch": 64,
        "--reserve": 0.1,
        "--device": "cuda",
        "--estimator": "roofline",
        "--proposer": "proving",
        "--storage-estimator": "torchrec_storage",
        "--partitioner": "longest_first",
        "--objective": "step_time",
    },
    "check": {},
    "explain": {"--table": "user"},
    "diff": {},
    "plugins": {},
    "demo": {"--ranks": 100_000_000, "--steps": 1, "--batch-size": 1 << 40},
}


class TooLongError(BaseException):
    """A case took more than its time."""


@frozen
class Outcome:
    """What came of a command: how it ended, and what it printed."""

    ending: str
    text: str

    @property
    def is_wrong(self) -> bool:
        """Whether that is neither a result nor an error in words."""
        return self.ending not in ("result", "error", "usage")


def outcome_of(work: Callable[[], Outcome]) -> Outcome:
    """What comes of work, whatever it raises."""
    try:
        return work()
    except TooLongError:
        ending = "time"
    except MemoryError:
        ending = "memory"
    except BaseException:
        ending = "traceback"
    return Outcome(ending, traceback.format_exc())


def run(*words: object) -> Outcome:
    """One command line, in this process."""
    return outcome_of(lambda: _run(*words))


def _run(*words: object) -> Outcome:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["shardwright", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("shardwright_plugins.commands.demo.command._launched"),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    return _ended(code, out.getvalue(), err.getvalue())


def _ended(code: int, out: str, err: str) -> Outcome:
    text = out + err
    if "MemoryError" in text or "RecursionError" in text:
        return Outcome("error of the machine", text)
    if code == 0:
        return Outcome("result", text)
    if code == 2:
        return Outcome("usage", text)
    is_told = err.startswith("error: ") or out.startswith("problem: ")
    return Outcome("error" if code == 1 and is_told else f"exit code {code}", text)


class Cases:
    """The cases of one kind.

    Args:
        kind: of :data:`KINDS`.
        seed: other cases for another.
        folder: for files.
    """

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self._kind, self._seed, self._folder = kind, seed, folder
        self._file = folder / "hostile.json"
        self._made = folder / "made.json"
        self._workload = self._written("workload.json", WORKLOAD)
        self._constraints = self._written("constraints.json", CONSTRAINTS)
        self._plans = [self._planned(), self._planned("--constraints", self._constraints)]

    def _written(self, name: str, data: Any) -> Path:
        path = self._folder / name
        path.write_text(json.dumps(data))
        return path

    def _planned(self, *more: object) -> Path:
        path = self._folder / f"plan{len(more)}.json"
        outcome = run("plan", self._workload, *_words(PLAN), "--output", path, *more)
        assert outcome.ending == "result", outcome.text
        return path

    def run(self, index: int) -> Iterator[Outcome]:
        """What comes of one case: of its command, and of what that made."""
        if self._kind == "named":
            yield from self._named_case(list(named.CASES)[index])
            return
        chance = random.Random(f"{self._seed}/{self._kind}/{index}")
        make: Callable[[random.Random], Iterator[Outcome]] = getattr(self, f"_{self._kind}_case")
        yield from make(chance)

    def _plan_case(self, chance: random.Random) -> Iterator[Outcome]:
        path = chance.choice(self._plans)
        self._file.write_bytes(mutated(json.loads(path.read_text()), chance))
        commands = {
            "check": ("check", self._file),
            "rewrite": ("check", "--rewrite", self._file),
            "explain": (
                "explain",
                self._file,
                "--table",
                chance.choice(("user", "item", "tower.shop", "hot")),
            ),
            "diff": ("diff", *chance.sample((path, self._file), 2)),
        }
        yield run(*commands[chance.choice(list(commands))])
        yield outcome_of(self._comes_back)

    def _comes_back(self) -> Outcome:
        """What is read is written, and what is written is read again as the same."""
        try:
            plan = ShardingPlan.from_json(self._file.read_text(encoding="utf-8-sig"))
        except (ShardwrightError, UnicodeDecodeError) as error:
            return Outcome("error", str(error))
        again = ShardingPlan.from_json(plan.to_json())
        str(plan)
        same = again == plan and json.loads(again.to_json()) == json.loads(plan.to_json())
        return Outcome("result" if same else "another plan comes back", plan.to_json()[:2000])

    def _named_case(self, name: str) -> Iterator[Outcome]:
        words = named.write(named.CASES[name], self._file, self._plans[1], self._workload)
        outcome = run(*words)
        told = named.CASES[name].told
        yield (
            outcome
            if told in outcome.text
            else Outcome(f"{outcome.ending} that does not say {told!r}", outcome.text)
        )

    def _workload_case(self, chance: random.Random) -> Iterator[Outcome]:
        self._file.write_bytes(mutated(WORKLOAD, chance))
        yield from self._planned_and_checked(self._file, *_words(PLAN), *self._report(chance))

    def _constraints_case(self, chance: random.Random) -> Iterator[Outcome]:
        self._file.write_bytes(mutated(CONSTRAINTS, chance))
        words = (*_words(PLAN), "--constraints", self._file)
        yield from self._planned_and_checked(self._workload, *words, *self._report(chance))

    def _report(self, chance: random.Random) -> tuple[object, ...]:
        suffix = chance.choice(("html", "json", "txt", ""))
        return ("--report", self._folder / f"report.{suffix}") if suffix else ()

    def _planned_and_checked(self, *words: object) -> Iterator[Outcome]:
        self._made.unlink(missing_ok=True)
        outcome = run("plan", *words, "--output", self._made)
        yield outcome
        if outcome.ending == "result":
            checked = run("check", self._made)
            yield checked if checked.ending == "result" else Outcome("a plan that is not right", checked.text)

    def _arguments_case(self, chance: random.Random) -> Iterator[Outcome]:
        command = chance.choice(list(COMMANDS))
        options = COMMANDS[command]
        files: list[object] = {"plan": [self._workload], "diff": self._plans[:2]}.get(command, [])
        files = files or ([self._plans[0]] if command in ("check", "explain") else [])
        if files and chance.random() < 0.3:
            odd = (
                "/dev/zero",
                "/dev/urandom",
                "/dev/null",
                "/",
                "/proc/self/mem",
                "none.json",
                "",
                sys.executable,
            )
            files[chance.randrange(len(files))] = chance.choice(odd)
        if command == "plan" and chance.random() < 0.3:
            options = {
                **options,
                "--constraints": "/dev/zero",
                "--output": "/",
                "--report": "/none/report.html",
            }
        yield run(command, *files, *(arguments(options, chance) if options else ()))


def _words(options: dict[str, Any]) -> list[str]:
    return [str(word) for option in options.items() for word in option]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise, in what computes longer; end the process if that is not noticed, with the stacks of its threads.

    Seconds of processor time, so that a machine that is busy with other things finds nothing; what waits ends too.
    """

    def late(signum: int, frame: Any) -> None:
        raise TooLongError

    previous = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    faulthandler.dump_traceback_later(5 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, previous)


def limit_memory(more_bytes: int) -> None:
    """Let this process have no more address space than it has, and so much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def plugins() -> PluginHost:
    """The built-ins, and the sharding types of contrib that have row maps of their own."""
    for folder in ("round_robin", "hot_rows"):
        sys.path.insert(0, str(CONTRIB / folder))
    import shardwright_hot_rows
    import shardwright_round_robin

    return PluginHost(
        plugins={"round_robin": shardwright_round_robin, "hot_rows": shardwright_hot_rows}, environment={}
    )


def wrong_of(kind: str, number: int, seed: int) -> list[int]:
    """Run cases of a kind, print what comes of those that are wrong, and give their numbers."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        cases = Cases(kind, seed, Path(folder))
        for index in range(number):
            print(f"case {index}", file=sys.stderr)
            outcomes: list[Outcome] = []
            with within(SECONDS):
                try:
                    outcomes.extend(cases.run(index))
                except TooLongError:  # between two commands
                    outcomes.append(Outcome("time", traceback.format_exc()))
            if faults := [outcome for outcome in outcomes if outcome.is_wrong]:
                wrong.append(index)
            for outcome in faults:
                print(f"{kind} case {index} of seed {seed}: {outcome.ending}\n{outcome.text[-3000:]}")
    return wrong


if __name__ == "__main__":
    number, seed, *kinds = sys.argv[1:]
    with use_host(plugins()):
        limit_memory(MEMORY_BYTES)
        print(json.dumps({kind: wrong_of(kind, int(number), int(seed)) for kind in kinds}))
