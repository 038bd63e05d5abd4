"""The tutorial from a trained model to a server: its programs, its package, and the request that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests import readme, stranger
from tests.contrib import distributions

pytest.importorskip("fastapi", reason="shardwright-serving needs FastAPI")

import httpx2
from tests.contrib.serving.server.test_processes import server, until

PAGE = readme.CORE_DOCS / "tutorials/to_a_server.md"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_tutorial_trains_exports_and_serves_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ctr.py", "train.py", "export.py"):
        Path(name).write_text(readme.source(name, PAGE))
    trained = stranger.run_python(*TORCHRUN, "train.py")
    assert trained.returncode == 0, trained.stderr
    exported = stranger.run_python("export.py", site=distributions.ROOT / "serving")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout == readme.output_of("export.py", PAGE)

    body = re.search(r"curl localhost:8000/predict --json '(.*)'", PAGE.read_text())
    answer = re.search(r'^\{"version".*\}$', PAGE.read_text(), re.MULTILINE)
    assert body
    assert answer
    shown = json.loads(answer[0])["outputs"]["score"]
    Path("current").symlink_to("package-1")
    with server(Path("current"), "--loader", "", "--workers", "1") as url:
        until(lambda: is_ready(url))
        found = httpx2.post(f"{url}/predict", json=json.loads(body[1])).json()
    assert found["version"] == json.loads(Path("package-1/package.json").read_text())["version"]
    assert found["outputs"]["score"] == pytest.approx(shown, abs=0.05)


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz").status_code == 200
    except httpx2.TransportError:
        return False
