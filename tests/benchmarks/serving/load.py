"""Load test of shardwright-serving: our package beside the same model in TorchRec's `quant` modules, one server's code.

    python -m tests.benchmarks.serving.load --peer PYTHON [--rates 200,400,800] [--seconds 5] [--samples 1] [--json]

``PYTHON`` is an interpreter that has TorchRec and what shardwright-serving needs. Both models have the same float
weights, quantized to INT8 by each side. For each rate the servers are loaded in turn, some rounds, by `hey` (Debian's
package), which sends at most so many requests a second over its connections; "most" sends the next as soon as one is
answered. A server slower than the rate answers fewer, and hey waits for it: look at answers a second first, then at
times.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table
from shardwright_serving import export_for_inference
from torch import nn

import shardwright as sw

ROOT = Path(__file__).parents[3]
LOADER = "tests.benchmarks.serving.torchrec_loader"
START_S = 120
"""Longest wait for a server."""
WARM_UP_S = 0.5
"""Time for which each server is loaded before anything is measured."""
TOLERANCE = 1e-3
"""Largest difference of the two models' predictions: both round rows to INT8, TorchRec with scales in float16."""


@frozen
class Work:
    """Sizes of the model and of a request."""

    tables: int
    rows: int
    dim: int
    ids: int
    samples: int

    @property
    def names(self) -> list[str]:
        """Names of the features."""
        return [f"f{index}" for index in range(self.tables)]

    def request(self) -> dict[str, Any]:
        """Draw a request."""
        random = np.random.default_rng(1)
        shape = (self.samples, self.ids)
        return {"features": {name: random.integers(0, self.rows, shape).tolist() for name in self.names}}


class Model(nn.Module):
    """The sum of each feature's rows, and a linear layer over all of them."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        tables = [
            sw.EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=work.rows, embedding_dim=work.dim, feature_names=[name]
            )
            for name in work.names
        ]
        self.bags = sw.EmbeddingBagCollection(tables)
        self.over = nn.Linear(work.tables * work.dim, 1)

    def forward(self, features: sw.KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return {"score": torch.sigmoid(self.over(self.bags(features).values())).squeeze(1)}


def write_packages(folder: Path, work: Work, forms: list[str]) -> tuple[Path, Path]:
    """Write the model as our package, and as weights with a manifest for TorchRec."""
    model = Model(work)
    example = sw.KeyedJaggedTensor.from_lists({name: [[1, 2], [3], []] for name in work.names})
    ours = export_for_inference(model, example, folder / "ours", forms=forms)
    manifest = json.loads((ours / "package.json").read_text())
    theirs = folder / "theirs"
    theirs.mkdir()
    torch.save(model.full_state_dict(), theirs / "model.pt")
    (theirs / "package.json").write_text(json.dumps({**manifest, "model": {}}))
    return ours, theirs


@frozen
class Side:
    """A server that is loaded."""

    name: str
    url: str


@contextmanager
def serving(name: str, python: str, package: Path, workers: int, *arguments: str) -> Iterator[Side]:
    """Start a server, and end it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    command = [
        python,
        "-m",
        "shardwright_serving",
        str(package),
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    path = os.pathsep.join([str(ROOT / "contrib/serving"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([*command, *arguments], env={**os.environ, "PYTHONPATH": path}, cwd=package)
    try:
        side = Side(name, f"http://127.0.0.1:{port}")
        version = json.loads((package / "package.json").read_text())["version"]
        wait_for(side, process, f'shardwright_workers{{version="{version}"}} {workers}.0')
        yield side
    finally:
        process.terminate()
        process.wait(30)


def wait_for(side: Side, process: subprocess.Popen[bytes], metric: str) -> None:
    """Wait until a server's metrics have a line: that all its workers have loaded the package."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{side.url}/metrics", timeout=5) as response:
                if metric in response.read().decode().splitlines():
                    return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.2)
    raise SystemExit(f"{side.name} did not start")


def predicted(side: Side, body: Path) -> list[float]:
    """Ask once."""
    with urllib.request.urlopen(f"{side.url}/predict", data=body.read_bytes(), timeout=30) as response:
        scores: list[float] = json.load(response)["outputs"]["score"]
    return scores


@frozen
class Row:
    """Figures of a server at a rate."""

    rate: float
    side: str
    answers_per_s: float
    p50_ms: float
    p99_ms: float
    refused: int


def loaded(side: Side, body: Path, rate: float, seconds: float, connections: int) -> Row:
    """Load a server for some seconds; the rate is 0 for as many requests as it answers."""
    limit = ["-q", f"{rate / connections:g}"] if rate else []
    command = ["hey", "-z", f"{seconds:g}s", "-c", str(connections), *limit, "-m", "POST", "-D", str(body)]
    done = subprocess.run(
        [*command, "-o", "csv", f"{side.url}/predict"], capture_output=True, text=True, timeout=seconds + 60
    )
    answers = list(csv.DictReader(io.StringIO(done.stdout)))
    times = [1e3 * float(one["response-time"]) for one in answers if one["status-code"] == "200"]
    p50, p99 = np.percentile(times, [50, 99])
    return Row(rate, side.name, len(times) / seconds, float(p50), float(p99), len(answers) - len(times))


def best(rounds: list[list[Row]]) -> list[Row]:
    """Take the best of each side's figures at a rate: other work on the machine only makes them worse."""
    return [
        Row(
            rows[0].rate,
            rows[0].side,
            max(row.answers_per_s for row in rows),
            min(row.p50_ms for row in rows),
            min(row.p99_ms for row in rows),
            max(row.refused for row in rows),
        )
        for rows in zip(*rounds, strict=True)
    ]


def main(
    peer: Annotated[str, typer.Option(help="Interpreter with TorchRec; none: our side alone.")] = "",
    peer_forms: Annotated[str, typer.Option(help="How TorchRec's model runs: eager, scripted.")] = "eager",
    programs: Annotated[str, typer.Option(help="Forms of our program.")] = "pt2",
    rates: Annotated[str, typer.Option(help="Requests a second; 0 for the most.")] = "200,400,800,1600,0",
    seconds: float = 2.0,
    rounds: Annotated[int, typer.Option(help="Runs of a rate, of which the best figures are taken.")] = 3,
    connections: int = 16,
    workers: int = 2,
    max_wait_ms: float = 2.0,
    tables: int = 8,
    rows: int = 100_000,
    dim: int = 64,
    ids: int = 10,
    samples: Annotated[int, typer.Option(help="Samples of a request.")] = 1,
    json_: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Load both servers at rising rates."""
    work = Work(tables, rows, dim, ids, samples)
    options = ["--max-wait-ms", str(max_wait_ms)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folder = Path(name)
        ours, theirs = write_packages(folder, work, programs.split(","))
        body = folder / "request.json"
        body.write_text(json.dumps(work.request()))
        sides = [
            servers.enter_context(
                serving(f"ours ({form})", sys.executable, ours, workers, *options, "--program", form)
            )
            for form in programs.split(",")
        ]
        for form in peer_forms.split(",") if peer else []:
            loader = ("--loader", f"{LOADER}:{form}")
            sides.append(
                servers.enter_context(serving(f"TorchRec ({form})", peer, theirs, workers, *options, *loader))
            )
        check_equal(sides, body)
        for side in sides:
            loaded(side, body, 0, WARM_UP_S, connections)
        found = [
            row
            for rate in map(float, rates.split(","))
            for row in best(
                [[loaded(side, body, rate, seconds, connections) for side in sides] for _ in range(rounds)]
            )
        ]
    print_rows(found, work, as_json=json_)


def check_equal(sides: list[Side], body: Path) -> None:
    """Check that all serve the same model; the first prediction of each is not measured either."""
    first, *others = [predicted(side, body) for side in sides for _ in range(20)][::20]
    for other in others:
        np.testing.assert_allclose(other, first, atol=TOLERANCE)


def print_rows(rows: list[Row], work: Work, *, as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        print(json.dumps({"work": asdict(work), "rows": [asdict(row) for row in rows]}))
        return
    table = Table(title=f"{work}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    for heading in ("requests/s", "server", "answers/s", "p50 ms", "p99 ms", "refused"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for row in rows:
        cells = (f"{row.answers_per_s:.0f}", f"{row.p50_ms:.1f}", f"{row.p99_ms:.1f}", str(row.refused))
        table.add_row(f"{row.rate:g}" if row.rate else "most", row.side, *cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
