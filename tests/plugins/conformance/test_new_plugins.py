"""What `shardwright plugin new` writes installs, is loaded, and passes the conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.stranger import run_python

from shardwright.hookspecs import KINDS

PIP = (
    "-m",
    "pip",
    "install",
    "--quiet",
    "--no-index",
    "--no-deps",
    "--no-build-isolation",
    "--disable-pip-version-check",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_new_plugin_installs_and_passes_the_kit(kind: str, tmp_path: Path) -> None:
    name, project, site = f"acme_{kind}", tmp_path / "project", tmp_path / "site"
    written = run_python("-m", "shardwright", "plugin", "new", name, "--kind", kind, "--output", str(project))
    assert written.returncode == 0, written.stderr
    installed = run_python(*PIP, "--target", str(site), str(project))
    assert installed.returncode == 0, installed.stderr
    shown = run_python("-m", "shardwright", "plugins", name, site=site)
    assert f"{name} ({kind}s), loaded" in shown.stdout, shown.stdout + shown.stderr
    options = (
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(project),
        str(project / "tests"),
    )
    tested = run_python("-m", "pytest", *options, site=site)
    assert tested.returncode == 0, tested.stdout[-4000:]
    assert " passed" in tested.stdout
