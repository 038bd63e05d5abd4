"""Small plugins, good and broken, for the doctor to look at."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core.conftest import installed, site  # noqa: F401 - fixtures

from shardwright.host import host


@pytest.fixture(autouse=True)
def loaded() -> None:
    """The plugins of this process are loaded before a test changes what is installed, or the environment."""
    host().plugins  # noqa: B018 - asking is what loads them


@pytest.fixture
def run_doctor(
    site: Path,  # noqa: F811
    installed: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `shardwright doctor` in this process with `DISTRIBUTIONS` installed; FBGEMM is taken as sound."""
    import typer

    from shardwright_plugins.commands.doctor.command import doctor
    from shardwright_plugins.compute_kernels import _fbgemm_check

    def run(*, json: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
        for name in [name for name in os.environ if name.startswith("SHARDWRIGHT_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        code, output, log = 0, io.StringIO(), logging.getLogger("shardwright.plugins")
        level = log.level
        try:
            with contextlib.redirect_stdout(output):
                doctor(json=json)
        except typer.Exit as end:
            code = end.exit_code
        finally:
            log.setLevel(level)
        return subprocess.CompletedProcess(["doctor"], code, output.getvalue(), "")

    monkeypatch.setattr(_fbgemm_check, "probe", lambda: None)
    return run
